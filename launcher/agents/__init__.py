"""Processes on other hosts, through an agent there, whatever brought it: ssh, mpirun, Slurm, or another manager.

An agent is told what to run over a link, starts it as children of its own, relays their output and their ends, and
ends them when the link goes. launch.py has a fleet of agents, which is a crew like any other.
"""
