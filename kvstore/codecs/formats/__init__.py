"""The codecs, by what they make of values.

planes     what those have in common that encode every element by itself, or in small blocks
halves     fp16 and bf16
int8       int8
bits       1bit and 2bit, MXNet's
sparse     topk, threshold and randomk: some of the elements as they are (selection: which)
powersgd   powersgd
"""
