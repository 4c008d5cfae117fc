# scheduler: on this machine
qsub -sync y -cwd -N kvstore -t 1-3 -S /bin/sh -j y -o .kvstore-job -r n .kvstore-job/script
# with this as .kvstore-job/script:
#!/bin/sh
KVSTORE_ENLIST="$(cat /.kvstore-job/ticket)" || exit 1
export KVSTORE_ENLIST
exec /usr/bin/python3 -c 'import os, sys; user = [os.path.abspath(p) for p in os.getenv("PYTHONPATH", "").split(":") if p]; sys.path[:] = [p for p in sys.path if p and p not in user] + user; from launcher.agents.main import main; sys.exit(main())'
#   server 0: DMLC_JOB_CLUSTER=sge DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=server DMLC_TASK_ID=0 KVSTORE_JOB='(the job)' /usr/bin/python3 (the clone)/kvstore/job/our_module.py servers
#   worker 0: DMLC_JOB_CLUSTER=sge DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=0 KVSTORE_JOB='(the job)' W=... /usr/bin/python3 train.py
#   worker 1: DMLC_JOB_CLUSTER=sge DMLC_NODE_HOST='(the host)' DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2 DMLC_PS_ROOT_PORT=0 DMLC_PS_ROOT_URI='(this machine)' DMLC_ROLE=worker DMLC_TASK_ID=1 KVSTORE_JOB='(the job)' W=... /usr/bin/python3 train.py
#   an aggregator on each host with two workers or more, if the hosts are several
