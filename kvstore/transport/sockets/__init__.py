"""Links over sockets of our own: what is sent leaves in the call that sends it.

transport  one member's end of its links
link       one link: how it is made, and made again when it is lost
queue      what has not left yet, in the order in which it goes
stream     messages in a stream of bytes
courier    the thread that connects, and sends what did not leave at once
tcp, unix  where sockets are: at addresses, or in a private directory
pacing     fair shares of a line
strangers  what those may cost who are not known yet (budget: of time)
"""
