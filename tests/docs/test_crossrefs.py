"""docs/crossrefs.py: which names in docstrings become links."""

from __future__ import annotations

import pytest

pytest.importorskip("griffe", reason="make docs installs it")

from docs import crossrefs


def test_classes_of_the_reference_and_their_methods_become_links() -> None:
    text = "see ``KVStore.set_optimizer``, ``workers.Trainer`` and ``UsageError``"
    assert crossrefs.linked(text) == (
        "see [`KVStore.set_optimizer`][kvstore.KVStore.set_optimizer], [`workers.Trainer`][workers.Trainer] and "
        "[`UsageError`][kvstore.UsageError]"
    )


def test_pages_become_links_with_their_titles() -> None:
    assert crossrefs.linked("see ``docs/compression.md``") == "see [Compression](../compression.md)"


def test_other_code_stays() -> None:
    text = "``push``, ``Module.fit``, ``KVStore(1)`` and ``None``"
    assert crossrefs.linked(text) == text
