"""What other people's training tools need to train in a job. Nothing here is imported before it is asked for.

torch_distributed  a process group of ``torch.distributed``: with it DDP trains here, and what is built on DDP, such as
                   ``accelerate`` and ``transformers.Trainer``. ``python -m workers.integrations SCRIPT`` makes it first
lightning          ``KVStoreStrategy``, PyTorch Lightning's DDP over that group
"""
