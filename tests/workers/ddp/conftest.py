"""Buckets that small networks have several of."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.common.buckets.FIRST_BYTES", 64)
    monkeypatch.setattr("workers.common.buckets.BUCKET_BYTES", 200)
