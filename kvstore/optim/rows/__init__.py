"""The rules by which gradients change the rows of tables: formulas for rows that have been gathered. Pure.

rule        what each rule does, and what it keeps of a row
sgd         SGD, with either kind of momentum
adam        Adam as torch's SparseAdam, and AdamW
adagrad     Adagrad as torch has it for sparse gradients
algorithms  optimizers of ``kvstore.optim.algorithms``, whose formulas serve rows as they are
"""
