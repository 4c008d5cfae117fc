"""The file of a job's trace, which an observer makes of what members have noted.

trace_writer  fetches what is new from the scheduler, and writes the file now and then
chrome        the events of the file, in the format that trace viewers read; clocks, tracks and requests
collected     what has been fetched, checked, by member
"""
