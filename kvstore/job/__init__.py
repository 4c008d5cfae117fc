"""What a process finds around it: settings, keys, addresses, files. Standard library only: launchers need it first."""
