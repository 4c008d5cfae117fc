"""`launcher.run`: jobs whose workers call a Python function.

A worker is a process of multiprocessing, by its spawn method: its command line and what it reads from its pipe are
multiprocessing's. But it is executed as a task of a local job, so it has a job's output, ending and keeper.
`multiprocessing.Process.start` would start it outside all three.
"""
