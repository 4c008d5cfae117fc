"""The programs of the measured processes. They time themselves and write a report.

rounds     rounds of push and pull with our store
mxnet      the same with MXNet
gloo       the same sums with gloo
mpi        the same sums with MPI
sockets    the same bytes over plain sockets
steps      training steps
stranger   invalid messages from outside of a job
servers    the servers' memory
checkpoints  steps of training with checkpoints among them
stopwatch  times and reports of all programs
"""
