"""The keys of a job, as a launcher makes them."""

from __future__ import annotations

from kvstore.job.curve_keys import pair


def variables(members: int) -> list[dict[str, str]]:
    pairs = [pair() for _ in range(members)]
    listed = ",".join(public for public, _ in pairs)
    return [
        {"KVSTORE_SECRET_KEY": secret, "KVSTORE_ROOT_KEY": pairs[0][0], "KVSTORE_MEMBER_KEYS": listed}
        for _, secret in pairs
    ]
