"""Shared memory for links inside one host.

transport  carries references where another transport would carry the bytes
arena      the owner's side: the memory that this process sends from
blocks     which parts of an arena are in use
mapped     the reader's side: a peer's arena
presence   who lives, what its files are called, and who sweeps the files of the dead
"""
