"""What train_ddp.py is made of, apart from the training."""
