"""Shared memory for links inside one host.

transport  carries references where another transport would carry the bytes; reads them from a peer's arena
arena      the owner's side: the memory that this process sends from
blocks     which parts of an arena are in use
presence   the files of an arena: their names, the lock that shows that their owner lives, and sweeping
"""
