"""Processes on this machine: started, watched, and ended whatever happens.

children     tasks as children of this process: a crew
child        one child and its two pipes
guard        our side of the keeper
keeper       the process that ends the job's processes if this one is killed
companion    a process beside the job that is no member of it
dashboard    the page of a job: where it is, and the companion that serves it
last_will    a command to run if this process is killed
jobdir       the job's private directory
observers_file the file that tells observers where the job is
readers_file the file that tells readers where the job is
suggestion   what may have been meant by a command that does not exist
machine      open files and standard streams of this machine
"""
