"""``python -m kvstore.bootstrap``: be the server supervisor that rank 0's process starts."""

from __future__ import annotations

import sys

from kvstore.bootstrap.server_supervisor import main

if __name__ == "__main__":
    sys.exit(main())
