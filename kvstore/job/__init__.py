"""What a process finds around it: settings, keys, addresses, files. Standard library only: launchers need it first.

settings     every environment variable: name, type, range, default, meaning
valid_values the kinds of values that they may have
config       what one process has to know of its job, read from these once
contract     what whoever starts a job tells each of its members
keyring      the keys of all members of a job
curve_keys   the CURVE keys of a job's members
place        what a process outside of a job must know of it, and the file that says it
observing_place  that of an observer, and this user's running jobs
address      the address by which other hosts reach this one
ranks        the rank of a process under torchrun, mpirun or srun
directory    a job's private directory, for its unix sockets
threads      torch's threads in a member of a job
processes    how the project's processes are started
exits        how a process has ended, in words
exit_report  why a process ends, told by itself to its supervisor
tracebacks   tracebacks without the frames of this project
uncaught     what becomes of an exception that nobody catches
system       the operating systems that jobs run on, and a process's cores
usage        what this process uses of its machine
title        the names of this process and of its host
our_module   executes one of the project's modules, whatever the user's modules are called
shadows      the user's modules that hide packages of the project
page_address where the page of a job is, and its token
trace_target the file of a job's trace, and the rounds that it has
exec_helper  what a new process does between fork and exec
files        files that are replaced whole or not at all
"""
