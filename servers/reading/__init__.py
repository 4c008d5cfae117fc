"""Readers on a server: their requests are answered in pieces, between the messages of workers. Pure."""
