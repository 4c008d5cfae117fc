"""Prints all settings as tables in Markdown, for the documentation."""

from kvstore.job.settings import markdown

print(markdown())
