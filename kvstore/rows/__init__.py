"""Tables of rows: their ids, their memory, how rows begin and go, and their files. No sockets.

ids          checks of ids, and which server has which
row_sparse   ``RowSparse``: rows with their ids, as users have them
"""
