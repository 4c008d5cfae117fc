"""The hosts of a job: which there are, who runs where, and whether they reach each other."""
