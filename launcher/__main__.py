"""`python -m launcher` is `launch.py`."""

from __future__ import annotations

import sys

from launcher.launch import main

sys.exit(main())
