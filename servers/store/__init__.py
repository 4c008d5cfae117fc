"""The stores on one server: what requests do to their arrays and tables, and what waits. Pure: no I/O, no clock."""
