"""A server's rank as a pair: the primary serves, and the standby has all that the primary has answered for."""
