"""Tensors over memory that other processes read, or have sent, where nobody can tell; see ``own_pages``."""

from __future__ import annotations

import torch
from torch import nn

from kvstore.transport.shm.own_pages import OwnBytes, has_own_pages
from workers.common.torch_internals import alone_in_memory

LEAST = 1 << 16  # bytes of a gradient; less is copied in less time than it takes to look


def as_tensor(own: OwnBytes, like: torch.Tensor) -> torch.Tensor:
    # Of its own storage, not a part of a larger one, which ``torch.save`` would write whole.
    return torch.from_numpy(own).view(like.dtype).view(like.shape)


def differs(tensor: torch.Tensor, own: OwnBytes) -> bool:
    """Whether ``tensor``, which was given the memory ``own``, has another value since."""
    moved = tensor.data_ptr() != own.ctypes.data or not tensor.is_contiguous()
    if own.pages is None or (not moved and not has_own_pages(own.ctypes.data, own.nbytes)):
        return False
    value = tensor.detach()
    if not value.is_cpu or value.nbytes != own.nbytes:
        return True
    start = own.ctypes.data - own.pages.address
    pristine = torch.from_numpy(own.pages.pristine[start : start + own.nbytes])
    return not torch.equal(value.contiguous().view(-1).view(torch.uint8), pristine)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in memory as all tensors do, and autograd does not follow it."""
    if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.layout != torch.strided or not tensor.is_cpu:
        return False
    if tensor.grad_fn is not None or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return False
    storage = tensor.untyped_storage()
    # In inference mode a tensor would be made that cannot be trained.
    return storage.nbytes() == tensor.nbytes and not storage.is_shared() and not torch.is_inference_mode_enabled()


def may_move(grad: torch.Tensor) -> bool:
    """Whether the gradient ``grad`` may be given other memory. What torch has not allocated is somebody's."""
    return is_plain(grad) and grad.nbytes >= LEAST and grad.untyped_storage().resizable() and alone_in_memory(grad)


def put_back(grad: torch.Tensor | None, place: int) -> None:
    """Give ``grad`` ordinary memory, if it is still at ``place``, and nothing else is there."""
    if grad is not None and grad.layout == torch.strided and grad.data_ptr() == place and alone_in_memory(grad):
        with torch.inference_mode(False):  # what is made in it could not be trained
            grad.data = grad.clone()
