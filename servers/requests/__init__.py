"""What servers and the scheduler do alike with requests. Pure.

ledger       which requests have been seen, and how they were answered
replies      a reply, its request, and where it goes; errors as replies
reply_links  the links of each member, over which it is heard and answered
reader_links the links of readers, over which nothing but reads is heard
speakers     who may ask a server, and for whom
reasons      what a request waits for, in words, and which workers
request_tracer what is noted of requests for the job's trace
captured     which captures for checkpoints are under way, and who waits for them
agreement    calls that all workers make and that take effect once
"""
