#!/bin/sh
export KVSTORE_ENLIST='tcp://10.0.0.1:9 a b c'
exec /usr/bin/python3 -c 'import os, sys; user = [os.path.abspath(p) for p in os.getenv("PYTHONPATH", "").split(":") if p]; sys.path[:] = [p for p in sys.path if p and p not in user] + user; from launcher.agents.main import main; sys.exit(main())'
