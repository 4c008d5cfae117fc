"""Shared memory for links inside one host.

transport  carries references where another transport would carry the bytes
own_frames the frames that transports send each other: arenas introduced, references
arena      the owner's side: the memory that this process sends from
blocks     which parts of an arena are in use
mapped     the reader's side: a peer's arena
presence   the files of an arena: their names, the lock that shows that their owner lives, and sweeping
"""
