"""Readers on a server: what they ask is answered in pieces, between the messages of workers. Pure.

desk        the requests of readers, in turn
value_read  values of segments, copied a piece at a time, each as one round has left it
row_read    rows of a table, likewise
pace        how much of a server's time readers get
"""
