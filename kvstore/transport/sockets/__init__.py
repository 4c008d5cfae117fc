"""Links over sockets without ZeroMQ: a message that fits leaves in the call that sends it.

transport  one member's end of its links
link       one link: how it is made, and mended when it is lost
queue      the messages that have not left yet, by priority
stream     messages in a stream of bytes
courier    the thread that connects, and sends what did not leave at once
tcp        TCP sockets: addresses, options, pacing
unix       unix sockets in a private directory
pacing     fair shares of a network line
strangers  limits on peers that are not known yet
budget     how much time strangers may take
"""
