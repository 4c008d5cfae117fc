"""A small language model of characters: text, network, schedule and options."""
