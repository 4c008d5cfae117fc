"""Tables of rows: their ids, their memory, how rows begin and go, and their files. No sockets.

saving         saves and loads, whatever the store
parquet        a saved table as a Parquet file
open_table     a saved table without servers: rows by id, for serving
table_files    the saves of a table in a directory, and how one is written
table_manifest what a save consists of, to JSON and back
row_table      a table in memory: pulls, updates, loading
updates        updates of several tables with one step of their optimizer
part_updates   the same, with what one or two workers have pushed, not summed
joint_tables   tables whose rows are looked up, gathered and written together
stripe         a table's slots and memory, and how rows are made and go
frozen_rows    a table as it was at one moment, read page by page while it changes
beginnings     the initial value of any row
admission      which new ids get rows
eviction       which rows go
gone           the ids of rows that have gone, for saves of what has changed
index          the slot of each id, in a table that grows
fixed_slots    the same, in a table with a shape
slab_space     memory that several tables have in common
huge_pages     when and where rows of a table with a shape are put into huge pages
slabs          memory that grows without being copied
mapped_memory  the memory of a slab, and how the system is asked for huge pages of it
sums           sums of rows with the same id
layout         rows as bytes on the wire
row_sparse     ``RowSparse``: rows with their ids, as users have them
contribution   what one worker pushes to a table: checked, and summed over its devices
wanted         which rows a worker asks for, and where they are written
first_rows     rows that a table begins with, or that are put into it
row_states     an optimizer's states of all rows, as files have them
ids            checks of ids, their hash, and which server has which
joint_ids      the ids of several tables, and checks of them
"""
