"""What a training script uses: the Trainer; averages of weights now and then; sums over workers.

from workers import Trainer

trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="dist_sync")
loss.backward()
trainer.step()
"""

from workers.averaging import PeriodicAveraging
from workers.partial import PartialSync
from workers.reducer import Reducer
from workers.trainer import Trainer

__all__ = ["PartialSync", "PeriodicAveraging", "Reducer", "Trainer"]
