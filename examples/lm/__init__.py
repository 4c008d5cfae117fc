"""A small language model of characters.

text         text as numbers, in two parts
transformer  the network
updates      what makes a step: all workers together, or each alone by DiLoCo; the learning rate over a run
options      the command line
"""
