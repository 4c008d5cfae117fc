"""Weights and gradients without a copy, where nobody can tell the difference.

Parameters become the values that servers send in shared memory, mapped so that this process may write to it
(``own_pages``), and backward's gradients move to memory that servers read. Both are given such memory only if nothing
but the tensor refers to its old memory. So a view, a numpy array, ``state_dict()``, tied ``.data``, a model in shared
memory or over a flat buffer get the new values by a copy, as they always have. What was taken is looked at before each
step: a page that the program has written to shows up for certain.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import increment_version

from kvstore import KVStore
from kvstore.transport.shm.own_pages import OwnBytes
from workers.common.own_memory import LEAST, as_tensor, differs, is_plain, may_move, put_back
from workers.common.pushed import Hooks
from workers.common.stores import updates_each_push
from workers.common.torch_internals import alone_in_memory

ALIGNED = 64  # as torch aligns its own memory: libraries may round otherwise elsewhere
_OWN = "_kvstore_own"  # the attribute of a tensor that holds a new value, with its bytes


class SharedWeights:
    """What of a trainer's parameters is the servers' memory.

    Args:
        share: True: every value that a store hands over becomes the ``data``, for reading only. False: all are copied.
            None: see above.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], store: KVStore, share: bool | None) -> None:
        self.copy = not share  # of ``KVStore.pull``
        self._own: dict[torch.Tensor, OwnBytes] = {}  # by parameter
        self._tensors = set(tensors)
        # Where each push is an update, a server whose memory is kept would copy its weights for each of them.
        if share is None and not updates_each_push(store.type):
            store.offer_values(self._adopt)
            store.when_closed(self.detach)

    def room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory that holds a new value of ``tensor`` until ``write`` is called with both."""
        held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        setattr(held, _OWN, None)
        return held

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Give ``tensor`` the ``value`` that has come."""
        own = getattr(value, _OWN, None)
        if not self.copy and tensor.is_cpu:
            tensor.data = value
        elif own is None or not self._adopt(tensor, own):
            tensor.detach().copy_(value)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` was given memory here."""
        return tensor in self._own

    def differs(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which was given memory here, has another value since."""
        return differs(tensor, self._own[tensor])

    def detach(self) -> None:
        """Give the parameters memory that nobody else has."""
        for tensor, own in self._own.items():
            if tensor.data_ptr() != own.ctypes.data:
                continue
            if alone_in_memory(tensor):
                with torch.inference_mode(False):  # what is made in it could not be trained
                    tensor.data = tensor.detach().clone()
            elif own.pages is not None:
                own.pages.detach()  # whatever else refers to it stays with it
        self._own.clear()

    def _adopt(self, tensor: torch.Tensor, own: OwnBytes) -> bool:
        if hasattr(tensor, _OWN):
            tensor.data = as_tensor(own, tensor)
            setattr(tensor, _OWN, own)
            return True
        before = self._own.pop(tensor, None)
        if tensor not in self._tensors or not _may_have(tensor, own, before):
            return False
        tensor.data = as_tensor(own, tensor)
        increment_version(tensor)  # as a copy would: backward through what has read the old value is an error
        self._own[tensor] = own
        return True


class SharedGradients:
    """Moves gradients to memory that a store pushes without a copy when backward has made them: they are in the cache.

    Args:
        paused: whether the gradients of now are better left where they are: they are pushed during backward.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], store: KVStore, paused: Callable[[], bool]) -> None:
        self._store, self._paused = store, paused
        self._tensors = [tensor for tensor in tensors if tensor.is_leaf and tensor.is_cpu and tensor.nbytes >= LEAST]
        self._places: dict[torch.Tensor, int] = {}  # by parameter, where its gradient was moved to
        self._hooks = Hooks(self, self._tensors if _leaves_at_once(store) else [])
        _sharing.add(self)
        store.when_closed(self.close)

    def arrive(self, position: int) -> None:
        tensor = self._tensors[position]
        grad = tensor.grad
        if grad is not None and not self._paused() and self._store.pushes_in_place and may_move(grad):
            # The tensor stays, and only its memory changes, so whoever holds it has the gradient.
            grad.data = self._store.empty(grad.shape, grad.dtype).copy_(grad)
            self._places[tensor] = grad.data_ptr()

    def detach(self) -> None:
        """Give the gradients memory that nobody else reads: after a push that may not be over, and before a fork."""
        for tensor, place in self._places.items():
            put_back(tensor.grad, place)
        self._places.clear()

    def close(self) -> None:
        self._hooks.remove()
        self.detach()


def _leaves_at_once(store: KVStore) -> bool:
    """Whether servers need what was pushed only until they answer: in rounds of all workers."""
    return not updates_each_push(store.type) and getattr(getattr(store, "rule", None), "quorum", None) is None


def _detach_all() -> None:
    for sharing in list(_sharing):
        sharing.detach()


_sharing: weakref.WeakSet[SharedGradients] = weakref.WeakSet()
os.register_at_fork(before=_detach_all)


def _may_have(tensor: torch.Tensor, own: OwnBytes, before: OwnBytes | None) -> bool:
    """Whether ``tensor``, which had the memory ``before``, may be given ``own`` without anybody's noticing."""
    if own.ctypes.data % ALIGNED or not (tensor.is_leaf and is_plain(tensor)):
        return False
    # A tensor that requires a gradient has no numpy array over itself: that would be over another tensor. What torch
    # has not allocated is somebody's: numpy's, a file's.
    ours = before is not None and tensor.data_ptr() == before.ctypes.data
    made_here = ours or tensor.untyped_storage().resizable()
    return tensor.requires_grad and made_here and alone_in_memory(tensor)
