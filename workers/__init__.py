"""What a training script uses: the Trainer, and sums over workers.

from workers import Trainer

trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="dist_sync")
loss.backward()
trainer.step()
"""

from workers.reducer import Reducer
from workers.trainer import Trainer

__all__ = ["Reducer", "Trainer"]
