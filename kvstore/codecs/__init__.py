"""Values in fewer bytes: what ``set_gradient_compression`` chooses between, for both ways of the wire. Pure.

A ``Compression`` is a name and numbers, and so can travel. A ``Compressor`` encodes with it and keeps, for every key,
what the encodings have lacked so far: it goes with the next one. ``opened``, ``decode``, ``assign`` and ``add`` are for
the other end, which keeps nothing and trusts no payload.

options     the description: how to compress
table       from a description to the code that does it
base        what a codec is
formats     the codecs
compressor  the sending end (memo: what it keeps of a key; work: one encoding while it is made)
payloads    the payloads of a message, checked
noise, scratch, host   random numbers, memory to work in, and where numpy can work
"""

from kvstore.codecs.base import Encoded, Opened
from kvstore.codecs.compressor import Compressor
from kvstore.codecs.options import CLOSE, Compression, names, parse
from kvstore.codecs.table import add, assign, decode, opened
from kvstore.codecs.work import Statistics, Works

__all__ = [
    "CLOSE",
    "Compression",
    "Compressor",
    "Encoded",
    "Opened",
    "Statistics",
    "Works",
    "add",
    "assign",
    "decode",
    "names",
    "opened",
    "parse",
]
