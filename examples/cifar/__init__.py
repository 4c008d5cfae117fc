"""What the CIFAR-10 example consists of, besides the training.

cifar10   the binary version of CIFAR-10
digits    handwritten digits, in its place
download  CIFAR-10's archive, once per host
choice    which of the two every worker uses
images    images in memory
loaders   a worker's batches, from torch's DataLoader
batches   a worker's batches for the comparisons, without a DataLoader
augment   random crops and mirrors
distort   random rotation, shear, scale and color
resnet    the networks
devices   the devices of --gpus
options   the command line
lines     log lines that fit does not print
settings  options of a store or codec in one word
results   tables and plots of the comparisons
"""
