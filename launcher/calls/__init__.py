"""`launcher.run`: jobs whose workers call a Python function.

A worker is a process of multiprocessing, by its spawn method: its command line and what it reads from its pipe are
multiprocessing's. But it is executed as a task of a local job, so it has a job's output, ending and keeper.
`multiprocessing.Process.start` would start it outside all three.

run          `launcher.run`
handover     the pickled call, and a process of multiprocessing for each worker
pickler      how a call is pickled
recipe       what the call needs of a notebook
sources      the source of functions and classes of a notebook
main_module  what a worker defines before the call
spawned      the crew of such a job
work         what a worker does: the call
outcome      what became of a call
memory       memory shared by inheriting a file descriptor
interrupts   signals and the time limit
streams      output to `sys.stdout` and `sys.stderr`
"""
