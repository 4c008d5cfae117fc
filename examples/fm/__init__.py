"""A factorization machine (Rendle, ICDM 2010), and data for it.

machine  the formula, given the rows of a batch
data     batches of features: from LibSVM files, or clicks that are made on the spot
options  the command line of train_fm.py and torch_fm.py
"""
