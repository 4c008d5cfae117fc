"""The hosts of a job: which there are, what runs where, and whether they reach each other."""
