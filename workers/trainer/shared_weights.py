"""Weights without a copy: parameters become the values that servers send, where nobody can tell the difference.

A value that comes in shared memory is mapped so that this process may write to it (``own_pages``). A parameter is given
such memory only if nothing but the parameter refers to its old memory. So a view, a numpy array, ``state_dict()``,
tied ``.data``, a model in shared memory or over a flat buffer get the new values by a copy, as they always have. What
was taken is looked at before each step: a page that the program has written to shows up for certain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from kvstore import KVStore
from kvstore.transport.shm.own_pages import OwnBytes, has_own_pages
from workers.common.stores import updates_each_push
from workers.common.torch_internals import alone_in_memory

LEAST = 1 << 16  # bytes; less is copied in less time than it takes to look
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
            store.offer_values(self._adopt, self.detach)

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
        own = self._own[tensor]
        moved = tensor.data_ptr() != own.ctypes.data or not tensor.is_contiguous()
        if own.pages is None or (not moved and not has_own_pages(own.ctypes.data, own.nbytes)):
            return False
        value = tensor.detach()
        if not value.is_cpu or value.nbytes != own.nbytes:
            return True
        start = own.ctypes.data - own.pages.address
        pristine = torch.from_numpy(own.pages.pristine[start : start + own.nbytes])
        return not torch.equal(value.contiguous().view(-1).view(torch.uint8), pristine)

    def detach(self) -> None:
        """Give the parameters memory that nobody else has."""
        for tensor, own in self._own.items():
            if tensor.data_ptr() != own.ctypes.data:
                continue
            if alone_in_memory(tensor):
                tensor.data = tensor.detach().clone()
            elif own.pages is not None:
                own.pages.detach()  # whatever else refers to it stays with it
        self._own.clear()

    def _adopt(self, tensor: torch.Tensor, own: OwnBytes) -> bool:
        if hasattr(tensor, _OWN):
            tensor.data = _as_tensor(own, tensor)
            setattr(tensor, _OWN, own)
            return True
        before = self._own.pop(tensor, None)
        if tensor not in self._tensors or not _may_have(tensor, own, before):
            return False
        tensor.data = _as_tensor(own, tensor)
        increment_version(tensor)  # as a copy would: backward through what has read the old value is an error
        self._own[tensor] = own
        return True


def _may_have(tensor: torch.Tensor, own: OwnBytes, before: OwnBytes | None) -> bool:
    """Whether ``tensor``, which had the memory ``before``, may be given ``own`` without anybody's noticing."""
    if type(tensor) not in (nn.Parameter, torch.Tensor) or own.nbytes < LEAST or own.ctypes.data % ALIGNED:
        return False
    # A tensor that requires a gradient has no numpy array over it itself: that would be over another tensor.
    if not (tensor.is_cpu and tensor.is_leaf and tensor.requires_grad and tensor.is_contiguous()):
        return False
    if torch.is_inference_mode_enabled():  # what is made here could not be trained
        return False
    storage = tensor.untyped_storage()
    ours = before is not None and tensor.data_ptr() == before.ctypes.data
    # What torch has not allocated is somebody's: numpy's, a file's, another process's.
    if not ours and (storage.is_shared() or not storage.resizable()):
        return False
    if storage.nbytes() != tensor.nbytes or tensor.is_conj() or tensor.is_neg():
        return False
    del storage
    return alone_in_memory(tensor)


def _as_tensor(own: OwnBytes, like: torch.Tensor) -> torch.Tensor:
    # Of its own storage, not a part of a larger one, which ``torch.save`` would write whole.
    return torch.from_numpy(own).view(like.dtype).view(like.shape)
