"""What servers and the scheduler do alike with requests. Pure."""
