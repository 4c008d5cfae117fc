"""``python -m kvstore.checkpoint`` is ``kvstore-checkpoint``."""

import sys

from kvstore.checkpoint.command import main

sys.exit(main())
