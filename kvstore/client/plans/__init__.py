"""Plans: where the arrays of a list of keys are, and which messages they take. Pure.

entries  what a worker knows of its store's keys
pieces   how many bytes a message should have
parcels  the messages that a list of keys takes, and which elements each has
plan     the plans of the lists that are in use
"""
