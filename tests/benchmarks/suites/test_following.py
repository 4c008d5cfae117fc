from __future__ import annotations

import pytest
import torch

from benchmarks.programs.followers import require_whole
from benchmarks.suites import following
from benchmarks.suites.following import Followed, followers, held
from benchmarks.targets import TARGETS, judge

PUBLISHED = {"7": 100.0, "14": 101.0}


def reports(slow: float = 0.5):
    """Jobs whose last reader has each version after so many seconds, or never."""

    def report(job: Followed):
        ways = job.words[job.words.index("--ways") + 1 :]
        times = {way: [50.0 + place] for place, way in enumerate(NAMED) if way in ways}
        versions = {way: PUBLISHED if way in ("followed", "files") else {} for way in times}
        memory = [[{"all": 300.0 + number}] * job.servers for number in range(3)]
        late = {int(rounds): at + slow for rounds, at in PUBLISHED.items() if slow < 9}
        arrivals = [{int(rounds): at + 0.1 for rounds, at in PUBLISHED.items()}] * (job.readers - 1) + [late]
        return {"times": times, "versions": versions, "memory": memory}, arrivals

    return report


NAMED = following.NAMES


def test_what_has_a_target_is_measured(session, monkeypatch):
    monkeypatch.setattr(Followed, "report", reports())
    made = session("followers")
    followers(made)
    assert made.failures == []
    verdicts = {verdict.target: verdict.ratio for verdict in judge(made.results)}
    assert list(verdicts) == [target for target in TARGETS if target.result.startswith("followers-")]
    assert None not in verdicts.values()
    results = {result.name: result for result in made.results}
    assert results["followers-rounds-1"].ratio("kvstore", "nothing published") == pytest.approx(52 / 50)
    assert results["followers-actor-round"].row("kvstore").median == pytest.approx(52 * following.ACTOR_ROUNDS / 2)
    assert [row.median for row in results["followers-crowd"].rows] == pytest.approx([500.0, 500.0])
    assert [row.median for row in results["followers-crowd-memory"].rows] == [1.0, 5.0]


def test_a_follower_that_lacks_versions_is_a_failure(session, monkeypatch):
    monkeypatch.setattr(Followed, "report", reports(slow=10.0))
    made = session("followers")
    followers(made)
    assert made.failures == ["1 follow", "64 follow"]


def test_a_mixture_of_versions_is_found(tmp_path):
    state, where = {"w": torch.tensor([[0.0, -4.0], [-4.0, 0.0]])}, {"w": torch.tensor([1, 2])}
    require_whole(state, where, -4.0)
    state["w"][0, 1] = -6.0
    with pytest.raises(RuntimeError, match="w has -6 to -4, and not -4"):
        require_whole(state, where, -4.0)
    with pytest.raises(RuntimeError, match="w has -6 to 0"):
        require_whole(state, {}, -4.0)
    (tmp_path / "reader0").write_text("7 100.5\n14 101.25\n")
    assert held(tmp_path / "reader0") == {7: 100.5, 14: 101.25}
