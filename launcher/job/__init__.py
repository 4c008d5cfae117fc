"""What to run: the job as the user describes it, and its processes. No I/O.

description  the job: how many workers and servers, which command, which variables
injection    a fault to inject
cluster      where it runs: the options that only some launchers take
command      the user's command as the words that are executed
tasks        the processes of a job, and the environment of each
batch        a job as text, for managers that queue it
dryrun       what `--dry-run` prints
"""
