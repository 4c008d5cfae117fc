"""What the MNIST scripts consist of, besides the training.

idx      MNIST's files
data     MNIST or the digits, and parts of them
cnn      SINGA's network
options  the command line
"""
