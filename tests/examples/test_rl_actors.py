"""rl_actors.py: the physics, the versions that actors follow, and a short real run with killed actors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import rl_actors
import torch
from reading_job import job_with_readers, reader_of
from scripts import EXAMPLES, launching, lines_of, run

import workers
from kvstore.client import DistStore


def test_a_cart_that_stands_still_and_is_pushed_moves_and_its_pole_falls_back() -> None:
    moved = rl_actors.moved(np.zeros((1, 4)), np.array([1]))
    np.testing.assert_allclose(moved, [[0, 0.1951, 0, -0.2927]], atol=1e-4)  # as Gymnasium's CartPole-v1


def test_games_end_when_all_poles_have_fallen_and_say_their_version() -> None:
    torch.manual_seed(0)
    games = rl_actors.play(rl_actors.network(), 7, np.random.default_rng(0))
    steps = len(games.up)
    assert games.version == 7
    assert 5 < steps <= rl_actors.LONGEST
    assert games.seen.shape == (steps, rl_actors.CARTS, 4)
    assert (np.diff(games.up, axis=0) <= 0).all()
    assert games.up[0].all()
    assert not games.up[-1].all()


def test_each_lesson_is_a_version_that_an_actor_gets_whole() -> None:
    with job_with_readers() as job:

        def work(store: DistStore) -> None:
            torch.manual_seed(0)
            policy, followed = rl_actors.network(), rl_actors.network()
            optimizer = {"learning_rate": 0.005}
            trainer = workers.Trainer(
                policy.named_parameters(), "adam", optimizer, kvstore=store, publish_every=rl_actors.PASSES
            )
            assert store.publish(label="untrained") == 1
            with reader_of(job) as reader:
                model = reader.follow(followed.state_dict())
                for lesson in range(1, 4):
                    model.update()
                    assert model.version == lesson
                    assert all(map(torch.equal, followed.state_dict().values(), policy.state_dict().values()))
                    games = rl_actors.play(followed, model.version, np.random.default_rng(lesson))
                    rl_actors.learn(policy, trainer, games)

        job.run(work)


@pytest.mark.release
def test_actors_are_killed_and_the_policy_learns(tmp_path: Path) -> None:
    words = launching(f"rl_actors.py {tmp_path / 'readers'} --kill-every 2", workers=1, servers=1)
    assert words[-1] == f"python {EXAMPLES / 'rl_actors.py'} {tmp_path / 'readers'} --kill-every 2"
    done = run([*words[:-1], "--readers", str(tmp_path / "readers"), words[-1]])
    assert done.returncode == 0, done.stdout
    *said, last = lines_of(done, 0)
    killed = re.search(r"actors killed: (\d+)", said[-1])
    assert killed is not None
    assert int(killed[1]) > 1
    steps = re.search(r"keeps the pole up for (\d+) steps", last)
    assert steps is not None
    assert int(steps[1]) > 150  # some 20 untrained
