"""Where ``Log`` writes values: files of this package's own, TensorBoard, and any other by a function or two.

tracker      the protocol of a tracker, and trackers made of functions
by_path      which tracker a path stands for
json_lines   JSON lines
csv_rows     CSV
tensorboard  TensorBoard's event files, by tensorboardX
appending    a file of lines that is continued after whatever has ended its writer
"""
