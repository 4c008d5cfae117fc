"""Processes on this machine: started, watched, ended whatever happens, and their output made one."""
