"""What the packages beside this one share. No file here imports another.

stores           the argument ``kvstore``: which store ``auto`` is
gather           a few integers of every worker, for all: do they mean the same?
buckets          which gradients travel in one message, and when
sparse_gradients sparse gradients as rows that a store sums
row_steps        what a store's trainer and the modules whose tables it has tell each other
pushed           hooks that tell of each gradient during backward; whether gradients are still what was pushed
chunks           values cut into chunks of bounded size
values           an optimizer's parameters and a model's buffers, by name
bundle           nested plain values with tensors, as msgpack
tensors          what users hand in, as tensors
checks           checks of arguments
read_ahead       batches that a generator has read, and not yet given to the program
run_log          the log lines of a training, seen without a set-up of logging
torch_internals  the internals of torch that are used here
"""
