"""A small language model of characters.

text         text as numbers, in two parts
transformer  the network
schedule     the learning rate over a run
options      the command line
"""
