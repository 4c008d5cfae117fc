"""``Trainer``, after ``gluon.Trainer``: sums gradients over all workers and devices, and updates with the sums.

trainer            ``Trainer``: its steps, alone and with the other workers; as torch's schedulers know an optimizer
trained_parameters its parameters, and what updates them in the worker, with which rates and states
gradient_sync      how gradients, dense or sparse, get to the store, and weights or sums come back
overlap            pushes gradients during backward, where the first steps have shown that this is right
arrivals           makes forward passes wait for new values
outside_writes     finds what the program has written into parameters that the store updates
rates              learning rates and other hyper-parameters, as torch's ``param_groups``
peers              what workers ask each other before a step
parameters         what a model gives, as one list of parameters by key
"""

from workers.trainer.trainer import Trainer

__all__ = ["Trainer"]
