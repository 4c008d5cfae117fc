"""Requests, whoever of the server and the scheduler they are for. Pure.

ledger       which have been seen, and what they were answered
replies      which reply goes to whom
reply_links  over which links members are heard and answered
agreement    calls that all workers make and that act once
"""
