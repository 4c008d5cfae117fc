"""The file of a job's trace, which an observer makes of what members have noted.

trace_writer  fetches what is new from the scheduler, and writes the file now and then
chrome        the events of the file, in the format that trace viewers read
requests      which notes are about the same request: who asked, who handled it, where the answer left and came
tracks        what one thread did, as spans of which none overlaps another
alignment     the clocks of all members on one time line
collected     what has been fetched, checked, by member
"""
