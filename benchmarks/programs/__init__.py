"""What the measured processes run, one program for each contender. They time themselves and write what they found."""
