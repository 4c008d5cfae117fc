"""A small language model of characters: its text, its network, its schedule and its options."""
