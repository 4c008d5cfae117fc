"""What to run: the job as the user has asked for it, its processes, and the environment of each. No I/O."""
