"""The stores on one server. Pure: no I/O, no clock.

served_stores    the open stores, and who has opened and closed them
optimizer_agreement  the calls of set_optimizer of one store
activity_of_stores  what all of them have done, and who waits in them, for reports
served_store     what requests do to one store
shortcuts        pushes of what has been pushed before: what has been found out about them then holds again
store_progress   closes its rounds, and answers the requests that wait for them
buckets          the store's segments, grouped into buckets as workers push them
served_tables    what requests do to its tables
row_service      requests about tables, each to what does it
value_replies    answers that bring the values of segments
contributions    what a push contributes to which buckets
bucket           segments that are pushed together: one piece of memory, one set of rounds
target           what contributions go to and requests wait for; a bucket is one
rounds           who has contributed to which round, where pushes are summed in rounds
clocks           how often each worker has pushed, where every push is an update
lateness         which workers' pushes come last, and how long others wait for one worker alone
updates          what contributions do to values: they are summed, or the optimizer steps with them
row_target       the stripe of a table that is here, and its rounds
row_requests     pushes and pulls of rows, checked; rows as answers
table_group      tables that are pushed together: one set of rounds for all of them
grouped_pushes   pushes of these
group_updates    what such pushes do to them
usual_push       what most pushes of rows are like: these are checked in a few steps
row_updates      what contributions do to tables: the optimizer steps with the sum of each row
row_answers      the rows that an update has changed, as answers to who has pushed them
row_freezes      tables as they were, for workers that read them while training goes on
waiting          requests that wait, for what, and when that is over
joins            workers that have nothing more to contribute for now
hyperparameters  the hyper-parameters that pushes bring
compression      compressed contributions and replies
capture          what checkpoints save: segments at chosen rounds
capture_memory   what they are copied to: touched before it is needed
states           the optimizer's states, out and in
finite           ``check_finite``
recording        what a standby is told of changes, so that it comes to the same state
snapshot         the whole state of a store, for a new standby
table_snapshot   that of its tables, page by page
row_arrays       arrays of rows in the buffers of messages
"""
