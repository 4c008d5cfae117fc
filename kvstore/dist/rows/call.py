"""What one call has of tables."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.dist.rows.contribution import RowContribution
from kvstore.dist.rows.plan import RowPlan
from kvstore.dist.rows.wanted import RowReader


class RowCall(NamedTuple):
    """Tables that share their messages, one for each server.

    Attributes:
        plan: of the tables.
        contribution: the rows to push; None to push nothing.
        reader: takes the rows that come back; None if none are wanted.
    """

    plan: RowPlan
    contribution: RowContribution | None
    reader: RowReader | None
