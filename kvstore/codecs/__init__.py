"""Compression of gradients and values, in both directions: what ``set_gradient_compression`` chooses from. Pure.

A ``Compression`` is a name and numbers, which a message can carry. The sender has a ``Compressor``, which encodes, and
keeps for every key the error of its encodings so far: the next encoding includes it. The receiver keeps nothing and
trusts no payload: it uses ``decode``, or what the ``check`` of the ``codec`` returns.
"""

from kvstore.codecs.codec import CheckedPayload, Encoded
from kvstore.codecs.compressor import Compressor, ResumableEncodings
from kvstore.codecs.described import decode
from kvstore.codecs.options import CLOSE, Compression, names, parse

__all__ = [
    "CLOSE",
    "CheckedPayload",
    "Compression",
    "Compressor",
    "Encoded",
    "ResumableEncodings",
    "decode",
    "names",
    "parse",
]
