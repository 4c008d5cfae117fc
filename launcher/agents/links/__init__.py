"""What launch.py and its agents say to each other, and how it gets there."""
