"""Tables of rows, a worker's side: what a call has of them, split over the servers, and what comes back.

plan          what a list of tables is, and which segments of it each server has
blocks        rows of several tables that lie in one array
striped       ids of several tables, split over the servers that have them
outgoing_rows the rows that a push carries
incoming_rows the rows that come back, until all are there
usual         what calls usually have of tables, checked together
arguments     the arguments of calls, checked
pending       what one call has of tables, and its requests
stored        a whole table: made, replaced, kept to be read, evicted from, counted
reading       a whole table read page by page while training goes on
stored_states the optimizer's states of rows, as files have them
"""
