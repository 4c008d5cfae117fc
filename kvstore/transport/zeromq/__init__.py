"""Links over ZeroMQ, encrypted with CURVE where there are keys.

transport    one member's end of its links
curve        keys, and who may connect
"""
