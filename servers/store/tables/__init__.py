"""What a store does with the rows of its tables: requests, updates, what is read back of them."""
