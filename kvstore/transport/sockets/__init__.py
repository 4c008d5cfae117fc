"""Links over sockets without ZeroMQ: a message that fits leaves in the call that sends it."""
