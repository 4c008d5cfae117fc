"""Processes on other hosts, which an agent on each host starts. ssh, mpirun or a cluster manager starts the agents.

An agent is told over a link what to run. It starts that as its children, relays their output and their exits, and ends
them when the link ends. `main` is the agent; all other modules are in launch.py.
"""
