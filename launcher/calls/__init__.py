"""Jobs whose workers call a function, started from Python: `launcher.run`.

A worker is a process of multiprocessing, by its spawn method: its command line is that of multiprocessing, and so is
what it reads from its pipe. Only that it is executed as a task of a local job, so that it has a job's output, ending
and keeper. `multiprocessing.Process.start` would start it where none of them sees it.
"""
