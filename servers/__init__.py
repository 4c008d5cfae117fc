"""What a server process is, and the scheduler: start one with ``python -m servers``, its role in ``DMLC_ROLE``."""
