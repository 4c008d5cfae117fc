"""The measurements, as functions of a session.

exchange     rounds of push and pull on one machine
network      rounds and steps across hosts
training     training steps on one machine
compression  codecs, and rounds with them
encryption   rounds with keys
scaling      rounds over workers, servers and sizes
memory       the servers' memory over many rounds
everything   all of these in one run
"""
