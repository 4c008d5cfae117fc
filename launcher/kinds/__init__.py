"""The launchers: one file for each kind of cluster. `registry` has them by name."""
