"""A process as a member of a job: it joins, sends requests and takes replies, sends heartbeats, and leaves."""
