"""Workers that hold the weights, die and come back, in virtual time: all have the same bits at each step."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulation.job import SimulatedJob
from simulation.network import Weather
from torch.nn.modules.module import register_module_forward_pre_hook

import kvstore.client.newcomers
from kvstore.client import DistStore
from kvstore.client.newcomers import Mailbox
from kvstore.optim import states_file
from servers.requests.kept_states import KeptStates
from workers import DistOpt, DistributedOptimizer, Embedding, PartialSync, PeriodicAveraging, Reducer, Trainer, fit
from workers.common import hand_over
from workers.common.hand_over import HandOver
from workers.common.tensors import overwrite

STEPS = 10
PACE_S = 0.5


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The hooks of all modules that there are. They are gone after each test: processes that died here leave theirs."""
    there: list[Any] = []

    def register(hook: Callable[..., None]) -> Any:
        handle = register_module_forward_pre_hook(hook)
        there.append(handle)
        return SimpleNamespace(remove=lambda: (handle.remove(), there.remove(handle)))

    monkeypatch.setattr(hand_over, "register_module_forward_pre_hook", register)
    yield there
    for handle in there:
        handle.remove()


class Progress:
    """What a program of one's own counts, behind the optimizer."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Averaged(torch.nn.Module):
    """A model with a frozen parameter, and buffers: the mean of its weights, and how many batches it has seen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight, self.scale = torch.nn.Parameter(torch.empty(40, 9)), torch.nn.Parameter(torch.empty(9))
        self.scale.requires_grad_(False)
        self.register_buffer("mean", torch.empty(40, 9))
        self.register_buffer("batches", torch.tensor(0))
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in (self.weight, self.scale, self.mean):
                value.normal_(generator=drawn)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        return (inputs @ (self.weight * self.scale)).pow(2).mean()

    @torch.no_grad()
    def average(self) -> None:
        self.mean.lerp_(self.weight, 0.1)


def rest(job: SimulatedJob, seconds: float) -> None:
    assert job.world.current is not None
    job.world.current.wait(seconds)


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


class Learners:
    """One job, whose workers train with ``kind`` of optimizer.

    Attributes:
        digests: by step, those of all that workers must have equal.
        came: at which steps workers came back, in order.
        job: the job.
    """

    def __init__(
        self,
        kind: str,
        kills: Sequence[tuple[int, float]] = (),
        explicit: bool = False,
        forward: bool = True,
        start_s: float = 0.2,
    ) -> None:
        self.digests: dict[int, set[str]] = defaultdict(set)
        self.came: list[int] = []
        self.job = SimulatedJob(
            *(0, Weather(delay_s=0.001), 3, 2),
            restarts=9,
            returns=True,
            reaped=True,
            start_s=start_s,
            min_workers=1,
        )
        self._make = {"optimizer": self._optimizer, "trainer": self._trainer, "on store": self._on_store}[kind]
        self._explicit, self._forward = explicit, forward
        for rank, at_s in kills:
            self.job.world.after(at_s, partial(self.job.kill, f"worker {rank}"))

    def run(self, program: Callable[[DistStore], int] | None = None) -> None:
        outcome = self.job.run(program or self._learn)
        assert not outcome.errors, outcome.errors
        assert not outcome.hanging
        torn = [step for step, digests in self.digests.items() if len(digests) > 1]
        assert not torn, f"workers have different weights, states, rates or buffers at steps {torn}"
        assert outcome.results == [STEPS] * 3

    def _optimizer(self, model: Averaged, store: DistStore) -> tuple[Any, Any, Callable[[], list[Any]]]:
        inner = torch.optim.Adam([model.weight], lr=0.1)
        outer = DistributedOptimizer(inner, model, kvstore=store)
        return outer, inner, lambda: list(inner.state[model.weight].values())

    def _on_store(self, model: Averaged, store: DistStore) -> tuple[Any, Any, Callable[[], list[Any]]]:
        return self._trainer(model, store, update_on_kvstore=True)

    def _trainer(
        self, model: Averaged, store: DistStore, update_on_kvstore: bool = False
    ) -> tuple[Any, Any, Callable[[], list[Any]]]:
        params, rate = model.named_parameters(), {"learning_rate": 0.1}
        trainer = Trainer(params, "adam", rate, kvstore=store, update_on_kvstore=update_on_kvstore)

        def states() -> list[Any]:
            with TemporaryDirectory() as directory:
                trainer.save_states(path := f"{directory}/states")
                return list(states_file.read(path)[1].values())

        return trainer, trainer.optimizer, states

    def _learn(self, store: DistStore) -> int:
        rank, job = store.rank, self.job
        model = Averaged(seed=100 * job.starts[f"worker {rank}"] + rank)
        outer, inner, states = self._make(model, store)
        scheduler, progress = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9), Progress()
        store.attach("scheduler", scheduler, shared=True)
        store.attach("progress", progress, shared=True)
        comes = store.newcomer
        if self._explicit:
            assert outer.come_back() == comes
        while progress.step < STEPS:
            rest(job, PACE_S / 2)
            if self._forward:
                model(torch.zeros(4, 40))  # a worker that was started again comes back here
            if comes and not store.newcomer:
                self.came.append(progress.step)
                comes = False
            inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(1000 * rank + progress.step))
            # Without hooks: no task may wait within a backward pass, for all are in one thread.
            (model.weight.grad,) = torch.autograd.grad(Averaged.forward(model, inputs), [model.weight])
            rest(job, PACE_S / 2)
            outer.step()
            outer.zero_grad()
            model.average()
            scheduler.step()
            progress.step += 1
            self.note(progress.step, [*model.state_dict().values(), *states()], inner.param_groups[0]["lr"])
        return progress.step

    def note(self, step: int, tensors: Sequence[torch.Tensor], rate: float = 0.0) -> None:
        self.digests[step].add(f"{rate} {digest_of(tensors)}")


@pytest.fixture(autouse=True)
def through_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are small: what is handed over goes through the servers all the same, in several messages."""
    monkeypatch.setattr(kvstore.client.newcomers, "MOST_STATE", 0)
    monkeypatch.setattr(kvstore.client.newcomers, "PAGE", 256)


@pytest.mark.parametrize("kind", ["optimizer", "trainer", "on store"])
def test_a_worker_that_died_goes_on_with_the_others_bits(kind: str, hooks: list[Any]) -> None:
    """Between two steps, in backward, while it waits for sums, and twice; worker 0 lets the others in."""
    for kills in ([(1, 1.26)], [(2, 1.499), (0, 2.1)], [(1, 1.02), (1, 2.4)], [(1, 1.2), (2, 1.2)]):
        learners = Learners(kind, kills, explicit=len(kills) == 1)
        learners.run()
        assert len(learners.came) >= len(kills) - (kills[0][0] == kills[-1][0] and len(kills) > 1), kills
        assert len(kills) > 1 or not hooks


class Owner:
    """What is made by a worker that was started again, after it has been let in."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}

    def give(self) -> dict[str, int]:
        return self.taken

    def take(self, state: Any) -> None:
        self.taken = state

    def buffers(self) -> list[torch.Tensor]:
        return []


def test_what_is_made_after_the_worker_has_been_let_in_takes_over_at_once() -> None:
    def attach(_name: str, thing: Any, **_: Any) -> bool:
        thing.load_state_dict({"step": 7, "begun": False})
        return True

    store: Any = SimpleNamespace(min_workers=1, newcomer=False, attach=attach, step_ended=False)
    owner = Owner()
    handed = HandOver(store, "Owner")
    handed.attach("second", owner.give, owner.take, [], owner.buffers)
    assert (owner.taken["step"], handed.waits, handed.state_dict()) == (7, False, {"step": 7, "begun": False})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["optimizer", "trainer", "on store"])
def test_a_sponsor_that_dies_while_it_hands_over_tears_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 dies after each of the messages that follow. Whoever comes next begins anew."""
    sending = Mailbox.send
    came = 0
    for after in range(1, 41, 3):
        learners, began = Learners(kind, [(1, 1.26)]), list[int]()
        job = learners.job

        def send(self: Mailbox, *given: Any, began: list[int] = began, job: SimulatedJob = job) -> Any:
            began.append(job.network.deliveries)
            return sending(self, *given)

        def look(began: list[int] = began, job: SimulatedJob = job, after: int = after) -> None:
            if len(began) == 1 and job.network.deliveries == began[0] + after:
                job.world.after(0.0, lambda: job.kill("worker 0"))

        monkeypatch.setattr(Mailbox, "send", send)
        job.network.on_delivery = look
        learners.run()
        assert job.starts["worker 0"] == 2
        came += len(learners.came)
    assert came > 14


def test_without_a_forward_pass_of_a_module_a_step_brings_it_back_or_says_what_to_call() -> None:
    learners = Learners("trainer", [(1, 1.26)], forward=False)
    learners.run()
    assert learners.job.starts["worker 1"] == 2
    with pytest.raises(AssertionError, match=r"call come_back\(\) of its DistributedOptimizer before the first batch"):
        Learners("optimizer", [(1, 1.26)], forward=False).run()
    Learners("optimizer", [(1, 1.26)], explicit=True, forward=False).run()


@pytest.mark.parametrize("make", [PeriodicAveraging, PartialSync])
def test_replicas_that_are_averaged_go_on_as_another_one_is(make: Any) -> None:
    """Each has weights of its own, so a worker that comes back has those of worker 0, as they were at that step."""
    learners = Learners("optimizer", [(1, 1.26), (2, 2.9)])
    job, of_worker_0 = learners.job, dict[int, str]()
    options = {"sync_every": 3} if make is PeriodicAveraging else {"chunk_bytes": 400}

    def program(store: DistStore) -> int:
        model = Averaged(seed=100 * job.starts[f"worker {store.rank}"] + store.rank)
        inner = torch.optim.Adam([model.weight], lr=0.1)
        outer = make(model, inner, store, **options)
        comes = store.newcomer

        def everything() -> list[torch.Tensor]:
            return [model.weight, model.scale, model.mean, *inner.state[model.weight].values()]

        while outer.steps < STEPS:
            model(torch.zeros(4, 40))
            if comes:
                assert not store.newcomer
                learners.came.append(outer.steps)
                assert of_worker_0[outer.steps] == digest_of(everything())
            comes = False
            rest(job, PACE_S)
            drawn = torch.Generator().manual_seed(1000 * store.rank + outer.steps)
            model.weight.grad = torch.randn(40, 9, generator=drawn)
            outer.step()
            learners.note(outer.steps, [model.batches])
            if store.rank == 0:
                of_worker_0[outer.steps] = digest_of(everything())
            if make is PeriodicAveraging and outer.steps % 3 == 0:
                learners.note(-outer.steps, [model.weight])
        outer.finish()
        learners.note(STEPS + 1, [model.weight])
        return outer.steps

    learners.run(program)
    assert len(learners.came) == 2


WAYS: dict[str, Callable[[DistOpt, torch.Tensor], None]] = {
    "plain": DistOpt.backward_and_update,
    "partial": partial(DistOpt.backward_and_partial_update, threshold=100),  # the weight, then the other parameter
    "half": DistOpt.backward_and_update_half,
    "sparse": partial(DistOpt.backward_and_sparse_update, spars=0.01),
    "topk": partial(DistOpt.backward_and_sparse_update, spars=0.1, topK=True),
}


@pytest.mark.parametrize("ways", [*([way] for way in WAYS), list(WAYS)], ids=[*WAYS, "all"])
def test_dist_opt_goes_on_whatever_it_sends(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What compression has held back at the worker that died is lost, and all have the same weights."""
    learners = Learners("optimizer", [(2, 1.499), (0, 2.1)], start_s=0.7)  # there are steps without them
    job, stores = learners.job, dict[Any, DistStore]()
    monkeypatch.setattr(kvstore, "create", lambda _: stores[job.world.current].companion())

    def program(store: DistStore) -> int:
        stores[job.world.current] = store
        model = Averaged(seed=100 * job.starts[f"worker {store.rank}"] + store.rank)
        still = torch.nn.Parameter(torch.ones(3))  # has no gradient: means of it are 1, whoever is lost
        inner = torch.optim.Adam([*model.parameters(), still], lr=0.1)
        outer, comes = DistOpt(inner, store), store.newcomer
        scheduler, progress = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9), Progress()
        store.attach("scheduler", scheduler, shared=True)
        store.attach("progress", progress, shared=True)
        while progress.step < STEPS:
            rest(job, PACE_S / 2)
            loss = model(torch.randn(4, 40, generator=torch.Generator().manual_seed(1000 * store.rank + progress.step)))
            if comes:
                learners.came.append(progress.step)
                comes = False
            rest(job, PACE_S / 2)
            way = ways[progress.step % len(ways)]
            WAYS[way](outer, loss)
            scheduler.step()
            progress.step += 1
            states = [] if way == "partial" else list(inner.state[model.weight].values())
            if way != "partial" or len(ways) > 1 or progress.step % 2:
                learners.note(progress.step, [*model.state_dict().values(), *states], inner.param_groups[0]["lr"])
            assert torch.allclose(still, torch.ones(3))
        outer.close()
        return progress.step

    learners.run(program)
    assert len(learners.came) == 2


def test_a_model_with_a_table_that_is_attached_is_handed_over_without_the_rows() -> None:
    """The servers have these. Who loaded them waited in a barrier for workers that train."""
    learners = Learners("trainer", [(1, 1.2)])
    job = learners.job

    def program(store: DistStore) -> int:
        rows = store.companion()
        rows.set_optimizer("sgd", learning_rate=0.5)
        torch.manual_seed(10 * store.rank + job.starts[f"worker {store.rank}"])
        model = torch.nn.Sequential(Embedding(9, 3, store=rows, key="rows"), torch.nn.BatchNorm1d(3, affine=False))
        progress = Progress()
        store.attach("model", model, shared=True)
        store.attach("progress", progress, shared=True)
        comes = store.newcomer
        store.boundary()
        learners.came += [progress.step] if comes else []
        while progress.step < STEPS:
            rest(job, PACE_S)
            model(torch.arange(progress.step, progress.step + 3) % 9).pow(2).mean().backward()
            progress.step += 1
            rows.barrier()
            learners.note(progress.step, [model.state_dict()["0.weight"], model[1].running_mean])
            store.boundary()
        return progress.step

    learners.run(program)
    assert len(learners.came) == 1


def test_fit_goes_on_with_the_others_weights_where_workers_have_them() -> None:
    """And with their buffers: here all have the same data, so these are equal, too."""
    learners = Learners("trainer", [(1, 3.7)])
    job, places = learners.job, defaultdict[int, list[tuple[int, int]]](list)

    def program(store: DistStore) -> int:
        rank, start = store.rank, job.starts[f"worker {store.rank}"]
        torch.manual_seed(10 * rank + start)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

        def note(param: Any) -> None:
            rest(job, PACE_S)
            places[10 * rank + start].append((param.epoch, param.nbatch))
            learners.note(10 * param.epoch + param.nbatch, list(model.state_dict().values()))

        data = [(torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 1, 0]))] * 6
        with Reducer.over(store.companion()) as reducer:
            fit(
                *(model, data),
                num_epoch=3,
                kvstore=store,
                reducer=reducer,
                optimizer="adam",
                update_on_kvstore=False,
                batch_end_callback=note,
                split=False,
            )
        return STEPS

    learners.run(program)
    whole = [(epoch, batch) for epoch in range(3) for batch in range(6)]
    before, after = places[11], places[12]
    assert places[1] == whole
    assert before
    assert after
    assert (before, after) == (whole[: len(before)], whole[-len(after) :])


def test_where_servers_update_it_has_rank_0s_first_buffers_and_frozen_parameters() -> None:
    """They were sent before training, beside the store that trains."""
    learners = Learners("trainer", [(1, 2.3), (0, 3.1)])
    job = learners.job

    def program(store: DistStore) -> int:
        model = Averaged(seed := 100 * job.starts[f"worker {store.rank}"] + store.rank)
        drawn = torch.Generator().manual_seed(seed)
        model.table = torch.nn.Parameter(torch.randn(5000, generator=drawn), requires_grad=False)  # 20 kB
        trainer = Trainer(model.named_parameters(), "adam", {"learning_rate": 0.1}, kvstore=store)
        if trainer.come_back():
            learners.came.append(trainer.num_update)
        while trainer.num_update < STEPS:
            rest(job, PACE_S)
            drawn = torch.Generator().manual_seed(1000 * store.rank + trainer.num_update)
            model.weight.grad = torch.randn(40, 9, generator=drawn)
            trainer.step()
            learners.note(trainer.num_update, list(model.state_dict().values()))
        return trainer.num_update

    learners.run(program)
    assert len(learners.came) == 2
    assert all(0 < step < STEPS for step in learners.came)


# ---- what is broken is found


whole = HandOver.state_dict


def states_stay_behind(self: HandOver) -> dict[str, Any]:
    state = whole(self)
    if "states" in state:
        return {**state, "states": []}
    optimizer = state["optimizer"]
    return {**state, "optimizer": {**optimizer, "tensors": [torch.zeros_like(each) for each in optimizer["tensors"]]}}


def weights_alone(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.requires_grad:
        overwrite(tensor, value)


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "the states of the optimizer stay behind": (HandOver, "state_dict", states_stay_behind),
    "frozen weights and buffers stay behind": (hand_over, "overwrite", weights_alone),
    "nothing is written": (hand_over, "overwrite", lambda tensor, value: None),
    "it is let in before the step has been counted": (DistStore, "end_step", DistStore.boundary),
    "nobody is let in": (DistStore, "end_step", lambda self: None),
    "forward passes count twice": (DistStore, "step_ended", False),
    "nothing is put on the servers": (KeptStates, "_pages", None),
}


def verdict(kind: str) -> str:
    learners = Learners(kind, [(1, 1.26)])
    try:
        learners.run()
        assert learners.came
    except AssertionError as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize("kind", ["optimizer", "trainer"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutated = MUTATIONS[name]
    if mutated is None:
        mutated = property(lambda self: {}, lambda self, pages: None)
    monkeypatch.setattr(owner, attribute, mutated, raising=False)
    assert verdict(kind)
