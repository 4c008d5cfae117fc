"""Arrays in and out: whatever the caller has becomes a torch tensor over the same memory. Torch begins here.

arrays     numpy, torch, cupy and DLPack arrays as tensors, and tensors as bytes
lists      lists of them, thousands at once (addresses: moved by where they lie)
ranges     one payload in several buffers
reduce     sums in a fixed order
staging    between devices and the host
copying    copies, many at once
overlap    whether arrays share memory
finite     whether values are finite
grads      work that autograd does not see; work of one thread
"""

from kvstore.dynamo import mark_early
from kvstore.values.addresses import collect, scatter
from kvstore.values.arrays import (
    as_dtype,
    as_output,
    as_tensor,
    as_tensors,
    from_buffer,
    made_of_others,
    readable,
    spec_of,
    split_like,
    to_buffer,
)
from kvstore.values.copying import copy_each, spread
from kvstore.values.finite import all_finite
from kvstore.values.grads import one_thread, without_grad
from kvstore.values.lists import Arrays, Layout, kinds_of, many_small, outputs_of, tensors_of, values_of
from kvstore.values.overlap import crossed
from kvstore.values.ranges import PayloadRange, TensorRange, cut, ranges_of, sum_ranges
from kvstore.values.reduce import reduce_to, sum_in_order, summed_in
from kvstore.values.staging import Leaving, from_host

mark_early()

__all__ = [
    "Arrays",
    "Layout",
    "Leaving",
    "PayloadRange",
    "TensorRange",
    "all_finite",
    "as_dtype",
    "as_output",
    "as_tensor",
    "as_tensors",
    "collect",
    "copy_each",
    "crossed",
    "cut",
    "from_buffer",
    "from_host",
    "kinds_of",
    "made_of_others",
    "many_small",
    "one_thread",
    "outputs_of",
    "ranges_of",
    "readable",
    "reduce_to",
    "scatter",
    "spec_of",
    "split_like",
    "spread",
    "sum_in_order",
    "sum_ranges",
    "summed_in",
    "tensors_of",
    "to_buffer",
    "values_of",
    "without_grad",
]
