"""The aggregator: for the workers of one host it stands in each server's place, and sums what they push.

core       messages in, replies out
store      one store: pushes that are summed, pulls that are shared
gathering  which pushes belong together, and when no more can come
loans      memory of devices that workers have lent: values that are summed where they lie
segments   what workers have told of the segments, and the lists in which they push them
sums       pushes that belong together, as one; or each by itself
exchanges  what is asked of a server, for whom, and what is made of its answer
encoding   compressed sums, and compressed values from servers
upstream   the links to the servers, beside those of the workers
process    the process
"""
