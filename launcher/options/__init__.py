"""The options of launch.py by subject. Each file adds a group to the parser. No I/O.

hosts        where processes run, and how they reach each other
failures     what happens if a process dies
checkpoints  what is saved while the job runs, and what a job continues from
observing    what shows the running job
readers      who may read values while the job runs
output       what is shown of the processes' lines, and the files that they go to
resources    what a cluster manager is asked for
values       the values that options take
"""
