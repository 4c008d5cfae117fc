"""What a member notes for the job's trace while a window of rounds is open, and sends over its heartbeat's link.

tracer   the notes of one process, bounded, and the chunks that carry them
offsets  by how much this process's clock and the scheduler's differ
"""
