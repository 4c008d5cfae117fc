"""The observer: a process beside a job, which shows how the job is. It is no member; its end changes nothing.

observer_process  looks at the job, and serves the page, until the job is over
watcher           the latest state of the job, for streams of events, and its history in bounded memory
trace_recording   fetches the rounds of a trace, and writes its file
web               the page, in page/, and its web server
access            which requests may read it. Pure
page_snapshot     what the page is told of a job. Pure
metrics           what Prometheus reads: all members, in its text format
grafana/          a Grafana board over these metrics, and rules for Prometheus' alerts
"""
