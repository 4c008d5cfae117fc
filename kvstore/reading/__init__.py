"""Readers: processes that take no part in training, and read what a running job's servers have. See ``connect``."""
