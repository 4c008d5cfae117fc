"""What can be measured, one file for each kind of work; each has functions that measure it in a session."""
