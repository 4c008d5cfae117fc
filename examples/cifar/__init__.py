"""What the CIFAR-10 example is made of: its data, its networks, its options and its checkpoints."""
