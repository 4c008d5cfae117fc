"""What launch.py and its agents say to each other, and how it gets there.

protocol     the messages
link         the interface of a link, and the link over pipes
framing      messages as a stream of bytes. No I/O
hub          links over TCP, which the agents make
ticket       what an agent needs to connect back
"""
