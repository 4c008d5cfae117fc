"""The aggregator of a host: it sums what the host's workers push, and is one worker's link to the servers for them all.

encoding  sums in fewer bytes, and what they lack so far
"""
