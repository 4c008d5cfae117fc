"""The codecs, by the form of their payloads.

planes     the base of codecs that encode every element by itself, or in small blocks
halves     fp16 and bf16
int8       int8
bits       1bit and 2bit, MXNet's
selection  topk, threshold and randomk: which elements those are
powersgd   powersgd
"""
