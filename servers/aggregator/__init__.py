"""For the workers of one host: their pushes are summed here, and go to the servers as one."""
