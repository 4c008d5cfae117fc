"""A small language model of characters.

text         text as numbers, in two parts
transformer  the network
schedule     the learning rate over a run
updates      what makes a step: all workers together, or each alone by DiLoCo
options      the command line
"""
