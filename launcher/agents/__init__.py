"""Processes on other hosts, which an agent on each host starts. ssh, mpirun or a cluster manager starts the agents.

An agent is told over a link what to run. It starts that as its children, relays their output and their exits, and ends
them when the link ends.

On the other host:
agent        the agent
main         its entry point
boot         the words that start it, or another module of the project

In launch.py:
run          a job through agents: start them, check the hosts, start the tasks, supervise
host_tasks   the tasks of the job: their environments, and what each agent is to start
fleet        the agents of one job: a crew
remote       one agent as launch.py sees it
answers      what hosts answer before the job begins
roll_call    asks all agents at once, and collects the answers and the problems
manager      agents that a cluster manager starts, which connect back
carrier      a program that starts agents: ssh, mpirun, srun, qsub

links/       the messages and the links that carry them
"""
