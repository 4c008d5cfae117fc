"""What train_ddp.py consists of, besides the training.

data     images as a torch data set; accuracy and loss, by all workers together
models   Needle's ResNet9
options  the command line
"""
