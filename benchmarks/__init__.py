"""Measurements, each of whole processes over several rounds; run one with ``python -m benchmarks WHAT``."""
