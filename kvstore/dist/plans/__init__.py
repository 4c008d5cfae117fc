"""What a list of keys means: where its arrays are, and which messages it takes. Pure.

entries  what a worker knows of its store's keys
parcels  the messages that a list of keys takes, and which elements each has
plan     the plans of the lists that are in use
"""
