"""The programs of the measured processes, one for each contender. They time themselves and write a report."""
