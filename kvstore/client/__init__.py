"""Stores that servers hold, a worker's side: see docs/architecture.md for its modules."""

from kvstore.client.dist import DistStore

__all__ = ["DistStore"]
