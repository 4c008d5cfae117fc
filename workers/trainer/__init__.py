"""``Trainer``, after ``gluon.Trainer``: sums gradients over all workers and devices, and updates with the sums.

trainer            ``Trainer``: its steps, alone and with the other workers
trained_parameters its parameters, what updates them, with which rates and states
gradient_sync      how gradients get to the store, and weights or sums come back
decision           where updates happen, and whether gradients are pushed during backward
overlap            pushes gradients during backward, once the first steps have shown that this is right
arrivals           makes forward passes wait for new values
outside_writes     finds what the program has written into parameters that the store updates
rates              learning rates and other hyper-parameters, as torch's ``param_groups``
updates            updates in the worker
peers              what workers ask each other before a step
optimizer          a trainer as torch's schedulers and GradScaler know an optimizer
sparse_parameters  parameters with sparse gradients, whose rows are pushed and pulled
parameters         what a model gives, as one list of parameters by key
"""

from workers.trainer.trainer import Trainer

__all__ = ["Trainer"]
