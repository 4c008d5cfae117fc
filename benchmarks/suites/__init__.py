"""The measurements, as functions of a session.

devices      sums on one of the GPUs of a host
exchange     rounds of push and pull on one machine
network      rounds and steps across hosts
grid         rounds on hosts with many workers each, in jobs that start over ssh
training     training steps on one machine
compression  codecs, and rounds with them
encryption   rounds with keys
scaling      rounds over workers, servers and sizes
cluster      the messages of thousands of workers, without processes; a model of a round
memory       the servers' memory over many rounds
publishing   versions for readers, and the bytes of changes
following    what followers cost a job, and what they get
everything   all of these in one run
"""
