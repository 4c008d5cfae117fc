"""What the packages beside this one share."""
