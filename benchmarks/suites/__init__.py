"""The measurements, one file for each kind of work, as functions of a session."""
