"""Where the lines of a job's processes go: to the terminal, and into log files.

display      decides for each line
lines        output as whole lines, each with the name of its process. No I/O
rewritten    output that is rewritten, as a progress bar is, for a terminal. No I/O
status_line  where a terminal shows that. No I/O
outlet       writes to standard output and standard error
live         the state of each process, for --live. No I/O
live_table   draws it, with rich
terminal     what the terminal can show
log_lines    the lines of a log file. No I/O
log_files    the files, and what is done when a disk is full
"""
