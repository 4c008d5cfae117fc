import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.rows.admission import write_beginnings
from kvstore.table import Table

MASK = 2**64 - 1


def _mix(x):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 31)


def _element(table, number, column):
    """One element, with Python's integers and floats."""
    h = _mix((number + table.seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & MASK)
    h = _mix((h + (column + 1) * 0x9E3779B97F4A7C15) & MASK)
    if table.init == "uniform":
        return ((h >> 11) * 2.0**-52 - 1.0) * table.scale
    t = (sum(h >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 65535) / math.sqrt((65536**2 - 1) / 3)
    return (t + (t * t - 3.0) * t / 80.0) * table.scale


def _rows(table, ids):
    rows = np.empty((len(ids), table.width), table.dtype)
    write_beginnings(table, np.array(ids, np.int64), rows)
    return rows


@settings(max_examples=30)
@given(
    st.sampled_from(["uniform", "normal"]),
    st.integers(0, 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([1, 3]),
    st.floats(0.001, 10),
)
def test_each_element_is_the_function_of_seed_id_and_column_that_the_module_says(init, seed, number, width, scale):
    table = Table(dim=width, dtype="float64", init=init, seed=seed, scale=scale)
    assert _rows(table, [number]).tolist() == [[_element(table, number, column) for column in range(width)]]


def test_values_stay_what_they_are():
    assert _rows(Table(dim=3, init="uniform", seed=1), [5]).tolist() == UNIFORM
    assert _rows(Table(dim=3, init="normal", seed=1), [5]).tolist() == NORMAL


def test_zeros_and_constants():
    assert _rows(Table(dim=2, scale=3.0), [1, 2]).tolist() == [[0, 0], [0, 0]]
    assert _rows(Table(dim=2, init="constant", scale=3.0), [1]).tolist() == [[3, 3]]


@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_a_row_does_not_depend_on_the_others(init):
    table = Table(dim=(7, 3), init=init)
    many = _rows(table, range(5000))
    assert np.array_equal(_rows(table, [4999, 0]), many[[4999, 0]])


def test_they_are_distributed_as_they_are_called():
    uniform = _rows(Table(dim=100, init="uniform", scale=2.0), range(1000))
    assert abs(uniform.mean()) < 0.02
    assert uniform.min() > -2
    assert uniform.max() < 2
    assert abs(uniform.std() - 2 / math.sqrt(3)) < 0.01
    normal = np.sort(_rows(Table(dim=100, init="normal"), range(1000)).ravel())
    for deviations in (-2, -1, 0, 1, 2):
        share = np.searchsorted(normal, deviations) / normal.size
        assert abs(share - 0.5 * (1 + math.erf(deviations / math.sqrt(2)))) < 0.006
    columns = _rows(Table(dim=50, init="normal"), range(2000))
    assert np.abs(np.corrcoef(columns.T) - np.eye(50)).max() < 0.12


UNIFORM = [[-0.23724409937858582, -0.5714535117149353, 0.49996817111968994]]
NORMAL = [[2.0103867053985596, 0.49389541149139404, 0.8772124648094177]]
