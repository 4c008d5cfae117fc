"""What train_ddp.py consists of, besides the training.

data        images as a torch data set
models      Needle's ResNet9
evaluation  accuracy and loss, by all workers together
options     the command line
"""
