"""A stream of clicks that is made on the spot, and what learns from it.

stream   the clicks: fields of ids, and labels from a hidden factorization machine
auc      the area under the ROC curve, and the logarithmic loss
dlrm     the network of train_dlrm.py and torch_dlrm.py, but for its embeddings
options  the command line of train_dlrm.py and torch_dlrm.py
"""
