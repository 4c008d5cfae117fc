"""A process of a job and its surroundings. Standard library only, for launchers need it before anything else.

settings     every environment variable: name, type, range, default, meaning
config       what one process has to know of its job, read from these once
curve_keys   the keys by which members know each other
address      the address by which other hosts reach this one
ranks        which of its siblings a process is, under torchrun, mpirun or srun
processes    how processes of ours are started (exec_helper: what is done between fork and exec)
files        files that are replaced whole or not at all
"""
