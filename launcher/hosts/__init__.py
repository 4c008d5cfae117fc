"""The hosts of a job: which there are, what runs where, and whether they reach each other.

hostfile     reads hostfiles
placement    which process runs on which host. No I/O
reach        the address by which others reach this host, and whether theirs answer
ssh          the command lines of ssh and rsync. No I/O
"""
