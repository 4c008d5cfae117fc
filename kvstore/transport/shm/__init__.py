"""Shared memory for links inside one host: references travel where another transport would carry the bytes."""
