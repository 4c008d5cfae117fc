"""The part of KVStore, the interface, that is about checkpoints."""

from __future__ import annotations

from typing import Any

from kvstore.errors import UsageError
from kvstore.store.named import Named


class CheckpointInterface(Named):
    """A store as what checkpoints of its job save."""

    def save_checkpoint(self, *, if_due: bool = False, wait: bool = False) -> int | None:
        """Save a checkpoint of the job; on all workers, at the same point of the program.

        It has the values and optimizer states of all stores of the job whose servers update, after exactly the pushes
        that worker 0 has made, and what was attached. Servers write while training goes on. The job needs a directory:
        ``launch.py --checkpoint-dir``. ``docs/checkpoints.md`` says more.

        Args:
            if_due: save only if ``--checkpoint-every`` says so. For the end of a step: without such calls, a checkpoint
                that is due is made before the first push of the next step.
            wait: return when the checkpoint is complete or has failed; else when servers have noted what to save.

        Returns:
            The number of the checkpoint that was begun; None if there is none, because none was due, the last one is
            still being written, or a state could not be saved. With ``wait``, None also if it has failed since, as far
            as this worker knows. What goes wrong is logged on worker 0, and counted in ``statistics``.

        Raises:
            UsageError: the job has no directory for checkpoints.
            Unsupported: this is no dist store, and ``if_due`` is False.
        """
        if if_due:
            return None
        raise self._unsupported("save_checkpoint")

    def attach(self, name: str, thing: Any, *, shared: bool = False) -> bool:
        """Let checkpoints of the job save the state of ``thing``, too, and load it now if the job was resumed.

        Every worker attaches the same names, before its first push. Where checkpoints are not supported, this does
        nothing.

        Args:
            name: of the thing, within the job.
            thing: an object with ``state_dict`` and ``load_state_dict``, whose state is built of dicts, lists, tensors,
                numbers and texts: a sampler, a scheduler, an optimizer of torch's, a model with buffers.
            shared: the state is the same on all workers, so that worker 0's is saved and all load it. Else each worker
                has its own, which is left out when another number of workers resumes.

        Returns:
            Whether a state was loaded.

        Raises:
            UsageError: ``thing`` lacks one of the methods.
        """
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"attach({name!r}, ...) takes an object with the methods state_dict and load_state_dict, not "
                f"{type(thing).__name__}"
            )
        return False
