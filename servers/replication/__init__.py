"""A server's rank as a pair: the primary serves workers, and the standby has all that the primary has answered for.

journal    the records that the standby has not stored yet
gate       answers that wait until the records before them are stored
primary    a shard that serves, and records what changes it
backlog    records that the standby has not applied, some of which it never has to
standby    takes the records of its primary, and applies them in order
held       requests that came before this process serves
replica    one of the pair, as its views say: primary or standby
link       the primary's link to its standby
process    the process
"""
