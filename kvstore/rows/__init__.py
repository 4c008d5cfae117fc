"""Tables of rows: their ids, their memory, how rows begin and go, and their files. No sockets."""
