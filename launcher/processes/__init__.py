"""Processes on this machine: started, watched, and ended whatever happens."""
