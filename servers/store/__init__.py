"""One store on one server. Pure: no I/O, no clock.

table            what pushes and pulls do to its segments
buckets, bucket  segments that are pushed together, as one stretch of memory
rounds           who has contributed to which round
clocks           how often each worker has pushed, where every push is an update
updates          what contributions do to values: they are summed, or the optimizer updates with them
waiting          requests that wait, and for whom
joins            workers that have nothing more to contribute for now
hyperparameters  what pushes ask of the optimizer
compression      compressed contributions and answers
states           the optimizer's states
finite           ``check_finite``
"""
