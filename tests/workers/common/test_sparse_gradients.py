from __future__ import annotations

import torch

from workers.common.sparse_gradients import as_gradient, as_rows, is_sparse, no_rows, table_key


def test_rows_of_gradients_and_back() -> None:
    weight = torch.zeros(5, 2, requires_grad=True)
    grad = torch.sparse_coo_tensor([[4, 1]], [[1.0, 2], [3, 4]], (5, 2), check_invariants=True)
    rows = as_rows(grad)
    assert (rows.ids.tolist(), rows.shape) == ([4, 1], (5, 2))
    back = as_gradient(as_rows(grad.coalesce()), weight)
    assert torch.equal(back.to_dense(), grad.to_dense())
    assert back.is_coalesced()
    assert as_rows(torch.eye(2)).ids.tolist() == [0, 1]
    assert not is_sparse(weight)
    weight.grad = no_rows(weight)
    assert is_sparse(weight)
    assert not weight.grad.to_dense().any()


def test_keys_of_tables_are_of_their_parameters_kind() -> None:
    assert (table_key("a.weight"), table_key(0), table_key(3)) == ("a.weight/rows", -1, -4)
