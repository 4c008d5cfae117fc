"""Measurements of whole processes over several rounds. Run one with ``python -m benchmarks WHAT``."""
