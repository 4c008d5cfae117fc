"""Runs of whole jobs under seeded faults, in which every update is counted."""
