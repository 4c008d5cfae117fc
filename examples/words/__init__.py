"""Identifiers of the standard library's source, and word2vec's skip-gram of them.

corpus    the identifiers of each file, and the pairs of them that are learned
skipgram  what pairs of vectors come to, and how well they tell a neighbour from other identifiers
options   the command line of train_word2vec.py and torch_word2vec.py
"""
