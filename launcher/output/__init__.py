"""Where the lines of a job's processes go: the terminal, log files."""
