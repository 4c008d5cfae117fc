"""`python -m launcher.agents` is an agent."""

from __future__ import annotations

import sys

from launcher.agents.main import main

sys.exit(main())
