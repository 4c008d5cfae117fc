"""Checkpoints of a running job in files: safetensors and JSON, without pickle.

    DIR/checkpoint-00000012/
        store-0.server-0.safetensors   what server 0 holds of store 0: values and optimizer states, segment by segment
        store-0.server-1.safetensors
        worker-0.safetensors           what worker 0 adds of its own
        manifest.json                  written last: what the files are, and which segment is which range of which key

A folder without a manifest is no checkpoint.

command    ``kvstore-checkpoint``: list, verify and export
export     a checkpoint as one plain file of arrays by name
verify     whether the files are what the manifest says
tables     tables in these files: rows page by page
reader     values and states of whole arrays, from however many servers
folders    the checkpoints in a directory: names, the newest, the removal of old ones
manifest   what a checkpoint consists of, to JSON and back, checked
tensors    a file of tensors, written in pieces with its sha256
schedule   when checkpoints are due
stateful   ``state_dict`` objects as tensors and JSON
"""
