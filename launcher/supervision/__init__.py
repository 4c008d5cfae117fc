"""The loop around a job: signals, and when and how the job ends."""
