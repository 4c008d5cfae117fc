"""The observer: a process beside a job, which shows how the job is. It is no member; its end changes nothing.

process     looks at the job, and serves the page, until the job is over
watcher     the latest state of the job, and its history
trace_recording fetches the job's trace, and writes its file
traced_rounds which rounds a trace has that begins while the job runs. Pure
web         the page's web server
access      who may read it. Pure
files       the page itself, in page/
feed        the latest state, for streams of events
snapshot    what the page is told of a job. Pure
history     what is drawn over time, in bounded memory. Pure
metrics     what Prometheus reads: all members, in its text format
series      the metrics that come from reports: their names, units and meanings
grafana/    a Grafana board over these metrics, and rules for Prometheus' alerts
"""
