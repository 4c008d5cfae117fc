"""The observer: a process beside a job, which shows how the job is. It is no member; its end changes nothing.

metrics     what Prometheus reads: all members, in its text format
series      the metrics that come from reports: their names, units and meanings
grafana/    a Grafana board over these metrics, and rules for Prometheus' alerts
"""
