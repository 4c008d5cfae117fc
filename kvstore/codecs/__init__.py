"""Compression of gradients and values, in both directions: what ``set_gradient_compression`` chooses from. Pure.

A ``Compression`` is a name and numbers, which a message can carry. The sender has a ``Compressor``, which encodes, and
keeps for every key the error of its encodings so far: the next encoding includes it. The receiver keeps nothing and
trusts no payload; it uses ``check_payload``, ``decode``, ``assign`` and ``add``.

options     the description of a compression: its type and its numbers
description the same in a message
table       the codec of a description; the receiver's functions
base        the interface of a codec
formats     the codecs
compressor  the sender: error feedback, momentum, statistics, state
memo        what the sender keeps of one key
resumable   one encoding, which an exception may interrupt anywhere
payloads    the payloads of a message, checked
noise       random numbers
scratch     memory to work in
host        which tensors numpy can work on
"""

from kvstore.codecs.base import CheckedPayload, Encoded
from kvstore.codecs.compressor import Compressor
from kvstore.codecs.options import CLOSE, Compression, names, parse
from kvstore.codecs.resumable import CompressionStatistics, ResumableEncodings
from kvstore.codecs.table import add, assign, check_payload, decode

__all__ = [
    "CLOSE",
    "CheckedPayload",
    "Compression",
    "CompressionStatistics",
    "Compressor",
    "Encoded",
    "ResumableEncodings",
    "add",
    "assign",
    "check_payload",
    "decode",
    "names",
    "parse",
]
