"""How a running job is: what an observer sees of it, and what follows from that.

command     ``kvstore-status``
observer_program  what it executes to serve a page or to write a trace
choice      which job is meant
session     an observer's link to the scheduler
view        the job at one moment: members, their reports, what has happened
figures     rates and shares that follow from reports
waits       who waits for whom
advice      what holds the job up, by rules that show their numbers
straggler   which worker holds up all others, and by what
looks       what looks at a straggler and at another worker say of its time
text        a job in lines
columns     tables of members: of many, what is usual and who differs
stacks_text  the stacks of members in lines
screen      where lines are written
as_json     a job as JSON
quantities  how numbers are written
"""
