#!/usr/bin/env python3
"""Train a policy for the cart-pole in one process, while actors play it in others and are killed now and then.

    launch.py -n 1 -s 1 --readers readers.json "python rl_actors.py readers.json"

The learner publishes a version after each step. An actor follows: it fetches the newest version before each game, and
says with the game which version has played it. So the learner knows how old its data are. A killed actor loses what it
was playing, and no more; the next one starts with the newest version. It needs half a minute on two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import kvstore as kv
import workers

CARTS = 16  # that an actor plays at once
LONGEST = 500  # steps of a game
SOLVED = 475  # steps on average
DISCOUNT, CLIP, PASSES = 0.99, 0.2, 4

# A process that has torch already, and forks the actors: they are there in a moment.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["kvstore", "numpy", "torch", "workers"])


class Games(NamedTuple):
    """What an actor has played: arrays of shape (steps, carts)."""

    version: int
    seen: np.ndarray  # what the carts were like before each step: float32, of shape (steps, carts, 4)
    pushed: np.ndarray  # which way: 0 or 1
    chance: np.ndarray  # logarithm of the probability that the policy gave to that
    up: np.ndarray  # 1.0 while the pole was up


def network() -> nn.Module:
    """The policy, which gives logits of both ways to push, and the value of what it sees."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))


# ---- actors


def act(readers: str, learner: Connection, seed: int) -> None:
    """Play forever, each time by the newest version."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy = network()
    with kv.connect(readers) as reader:
        model = reader.follow(policy.state_dict())
        model.wait_newer()
        while True:
            learner.send(play(policy, model.version, np.random.default_rng(seed)))  # waits until the learner takes it
            seed += 1_000_003
            model.update()  # nothing comes if there is no newer version; else what has changed


@torch.no_grad()
def play(policy: nn.Module, version: int, rng: np.random.Generator) -> Games:
    """Play until all poles have fallen."""
    carts = rng.uniform(-0.05, 0.05, (CARTS, 4))  # position, speed, angle, and speed of the angle
    standing = np.ones(CARTS, bool)
    steps = []
    while standing.any() and len(steps) < LONGEST:
        seen = carts.astype(np.float32)
        chances = policy(torch.from_numpy(seen))[:, :2].log_softmax(1)
        pushed = torch.multinomial(chances.exp(), 1)
        steps.append((seen, pushed[:, 0].numpy(), chances.gather(1, pushed)[:, 0].numpy(), standing.astype(np.float32)))
        carts = moved(carts, pushed[:, 0].numpy())
        standing &= (np.abs(carts[:, 0]) < 2.4) & (np.abs(carts[:, 2]) < 0.2095)
    return Games(version, *map(np.stack, zip(*steps, strict=True)))


def moved(carts: np.ndarray, pushed: np.ndarray) -> np.ndarray:
    """Return the carts 20 ms later, by the equations of Barto, Sutton and Anderson (1983)."""
    x, dx, angle, dangle = carts.T
    sine, cosine = np.sin(angle), np.cos(angle)
    push = (10.0 * (2 * pushed - 1) + 0.05 * dangle**2 * sine) / 1.1
    turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    speed = push - 0.05 * turn * cosine / 1.1
    return np.stack([x + 0.02 * dx, dx + 0.02 * speed, angle + 0.02 * dangle, dangle + 0.02 * turn], 1)


# ---- the learner


class Actors:
    """Processes that play; one is killed every ``every`` seconds, and another one started."""

    def __init__(self, readers: str, count: int, every: float) -> None:
        self.killed = 0
        self._readers, self._every, self._started = readers, every, 0
        self._running = [self._start() for _ in range(count)]
        self._next = time.monotonic() + every

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        ours, theirs = CONTEXT.Pipe()
        self._started += 1
        process = CONTEXT.Process(target=act, args=(self._readers, theirs, self._started), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def games(self) -> list[Games]:
        """Return what has been played by now, at least once; the dead are replaced."""
        games: list[Games] = []
        ready = wait([pipe for _, pipe in self._running])
        for process, pipe in [one for one in self._running if one[1] in ready]:
            try:
                games.append(pipe.recv())
            except (EOFError, ConnectionError):  # it was killed, perhaps while it sent
                pipe.close()
                process.join()
                self._running.remove((process, pipe))
                self._running.append(self._start())
            if games and time.monotonic() > self._next:
                process.kill()
                self.killed += 1
                self._next = time.monotonic() + self._every
        return games

    def close(self) -> None:
        for process, _ in self._running:
            process.kill()
            process.join()


def learn(policy: nn.Module, trainer: workers.Trainer, games: Games) -> None:
    """Make some steps by proximal policy optimization, which allows for games by versions that are a little older."""
    rewards, value = games.up, np.zeros(CARTS, np.float32)
    returns = np.zeros_like(rewards)
    for step in reversed(range(len(rewards))):
        value = rewards[step] * (1 + DISCOUNT * value)
        returns[step] = value
    played = torch.from_numpy(rewards > 0)
    seen, pushed, before, wanted = (
        torch.from_numpy(array)[played] for array in (games.seen, games.pushed, games.chance, returns / 100)
    )
    for _ in range(PASSES):
        out = policy(seen)
        better = wanted - out[:, 2].detach()
        better = (better - better.mean()) / (better.std() + 1e-6)
        ratio = (out[:, :2].log_softmax(1).gather(1, pushed[:, None])[:, 0] - before).exp()
        gain = torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better).mean()
        trainer.zero_grad()
        ((out[:, 2] - wanted).square().mean() - gain).backward()
        trainer.step()


def main() -> None:
    """Train until the pole stays up, and print how good the policy is and how old the games are."""
    parser = argparse.ArgumentParser(description="Train a policy that actors follow")
    parser.add_argument("readers", help="the file of launch.py --readers")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it may take")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    store = kv.create("dist_sync")
    policy = network()
    trainer = workers.Trainer(
        policy.named_parameters(), "adam", {"learning_rate": 0.005}, kvstore=store, publish_every=PASSES
    )
    version = store.publish(label="untrained")
    actors = Actors(args.readers, args.actors, args.kill_every)
    began = said = time.monotonic()
    recent, lags = [0.0], []
    while time.monotonic() - began < args.seconds and np.mean(recent[-10:]) < SOLVED:
        for games in actors.games():
            recent.append(games.up.sum(0).mean())
            lags.append(version - games.version)
            learn(policy, trainer, games)
            version += 1
        if lags and time.monotonic() - said > 2:
            said = time.monotonic()
            print(
                f"{said - began:3.0f} s: version {version}; games took {np.mean(recent[-10:]):3.0f} steps, and were "
                f"{np.mean(lags):.1f} versions old, {max(lags)} at most; actors killed: {actors.killed}",
                flush=True,
            )
            lags = []
    actors.close()
    print(f"version {version} keeps the pole up for {np.mean(recent[-10:]):.0f} steps", flush=True)


if __name__ == "__main__":
    main()
