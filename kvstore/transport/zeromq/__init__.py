"""Links over ZeroMQ, which encrypts them with CURVE if it has keys.

transport  one member's end of its links
curve      keys and who may come in
losses     which connections are lost
"""
