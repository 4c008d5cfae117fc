"""The interface of all stores, ``create``, and the stores that need no job."""
