"""The rules by which gradients change the rows of tables: formulas for rows that have been gathered. Pure.

row_rules  SGD, Adam and Adagrad of rows; and optimizers whose formulas serve rows as they are
"""
