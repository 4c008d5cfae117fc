"""Checkpoints of a running job in files: safetensors and JSON, without pickle.

    DIR/checkpoint-00000012/
        store-0.server-0.safetensors   what server 0 holds of store 0: values and optimizer states, segment by segment
        store-0.server-1.safetensors
        worker-0.safetensors           what worker 0 adds of its own
        manifest.json                  written last: what the files are, and which segment is which range of which key

A folder without a manifest is no checkpoint.
"""
