"""What a member notes for the job's trace while a window of rounds is open, and sends over its heartbeat's link."""
