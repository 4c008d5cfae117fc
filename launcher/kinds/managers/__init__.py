"""What the cluster managers have in common.

programs     their commands: required, or run without waiting for an answer
queued       following a queued job: output, exit code, cancellation
units        sizes and times in their notation
"""
