"""What train_mnist.py needs beside the training: data, the network, the command line."""
