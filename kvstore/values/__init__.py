"""Arrays in and out: whatever the caller has becomes a torch tensor over the same memory. Torch begins here."""

from kvstore.values.arrays import as_output, as_tensor, as_tensors, from_buffer, spec_of, to_buffer
from kvstore.values.reduce import reduce_to, sum_in_order
from kvstore.values.staging import from_host, to_host

__all__ = [
    "as_output",
    "as_tensor",
    "as_tensors",
    "from_buffer",
    "from_host",
    "reduce_to",
    "spec_of",
    "sum_in_order",
    "to_buffer",
    "to_host",
]
