"""Optimizers, described by a name and numbers, so that a server can have one."""
