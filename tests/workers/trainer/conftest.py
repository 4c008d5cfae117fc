"""A trainer that overlaps."""

from __future__ import annotations

import pytest
from overlapping import Rig


@pytest.fixture(params=[True, False], ids=["on the store", "in the worker"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(update_on_kvstore=request.param)
