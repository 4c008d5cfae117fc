"""MXNet's optimizers that torch.optim lacks, as torch optimizers. Each is a formula for one tensor.

tensorwise   what they share: one tensor after another, and what an optimizer says of itself
momentum     sgd and nag with MXNet's momentum; signum, dcasgd
adaptive     adabelief, ftml, ftrl, groupadagrad, rowwiseadagrad, rowwiseadam: a rate for each element, or for each row
layerwise    lamb, lans, lars: a rate for each tensor, by its norms
langevin     sgld: noise as large as the rate
"""
