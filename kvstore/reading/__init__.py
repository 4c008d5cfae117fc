"""Readers: processes that take no part in training, and read what a running job's servers have. See ``connect``.

connect   ``connect``: from a file, an address or the environment to a reader
place     where a job is read, and with which key: the file of ``launch.py --readers``
reader    the reader: values and rows at a staleness that is asked for
held      the values that a reader holds, each segment with its version
held_rows the rows that a reader holds, likewise
session   a reader's links: it finds the servers, follows them, and says why nobody answers
"""
