"""What the packages beside this one share: how values are named and cut, and what all workers agree on first."""
