"""Real jobs that lose servers and schedulers, and are read meanwhile; and that go on with more servers."""

from __future__ import annotations

import ast
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from jobs import job
from waiting import LONG, PROMPT, until

import kvstore as kv
from launcher import job_command

# ---- a reader of a real job, which loses a server and its scheduler meanwhile, and then ends


ROUNDS = 20  # between two faults

SCRIPT = """
    from pathlib import Path

    import torch
    import kvstore as kv
    import workers

    workers.init()  # this store, a reducer's and the checkpoints' are not what a reader reads first
    workers.Reducer()
    store = kv.create("dist_sync")
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("weight", torch.zeros(2000))
    store.init("rows", kv.Table(shape=(10, 2)))
    every = torch.arange(10)
    weight, stop = torch.empty(2000), Path(__file__).with_name("stop")
    while not stop.exists():
        store.push("rows", kv.RowSparse(every, -torch.ones(10, 2)))
        store.pushpull("weight", -torch.ones(2000), out=weight)
        store.publish(label=f"{weight[0]:.0f}", dtype=torch.bfloat16)
"""


@pytest.mark.long
def test_a_reader_follows_its_job_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_READER_SHARE", "0.2")
    file = tmp_path / "readers.json"
    options = ["--replicas", "1", "--readers", str(file), "--inject", f"kill:server:0@round:{2 * ROUNDS}"]
    options += ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    with job(tmp_path, SCRIPT, workers=1, servers=1, options=options) as running:
        running.until(file.exists, "the file for readers")
        with kv.connect(file, timeout=LONG) as reader:
            reader.wait_for(["weight", "rows"])
            followed = torch.zeros(2000, dtype=torch.bfloat16)
            model = reader.follow({"weight": followed})
            table = reader.open_table("rows")

            def follow(rounds: int) -> None:
                """Read until there have been so many rounds."""
                seen = 0
                while seen < rounds:
                    weight = reader.pull("weight")
                    oldest, newest = reader.rounds("weight")
                    assert (weight.min(), weight.max()) == (oldest, newest)
                    assert oldest >= seen
                    row = reader.row_sparse_pull("rows", row_ids=[4, 5])
                    assert row.min() >= seen
                    version = model.version
                    if model.update():
                        assert model.version > version
                        assert followed.unique().tolist() == [torch.tensor(float(model.label)).bfloat16().item()]
                    version = table.version
                    if table.update():
                        assert table.version > version
                        assert table.lookup(range(10)).unique().tolist() == [float(table.label)]
                    seen = oldest

            follow(3 * ROUNDS)  # the server is lost
            running.until(running.said("its standby took over"), "a standby that takes over")
            (scheduler,) = running.members("scheduler")
            os.kill(scheduler, signal.SIGKILL)
            follow(reader.rounds("weight")[1] + ROUNDS)
            assert set(reader.keys()) == {"weight", "rows"}
            before = table.version
            assert table.wait_newer() > before
            (tmp_path / "stop").touch()
            with pytest.raises(kv.NodeLost, match="has ended"):
                follow(1 << 30)
        until(lambda: not running.members("worker"), "the workers to go", step=0.1)
        assert running.wait(PROMPT) == 0, running.output
        assert not running.members()
    assert not file.exists()


# ---- a real job whose scheduler is killed again and again


COUNTS = """
    import os
    import signal
    import time
    from pathlib import Path

    import numpy as np
    import kvstore as kv

    took = {}

    def kill():
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                env = (entry / "environ").read_bytes().split(b"\\0")
            except OSError:
                continue
            if b"DMLC_ROLE=scheduler" in env and b"TEST_MARK=" + os.environb[b"TEST_MARK"] in env:
                os.kill(int(entry.name), signal.SIGKILL)

    def timed(name, call, *args):
        began = time.monotonic()
        result = call(*args)
        took[name] = max(took.get(name, 0.0), time.monotonic() - began)
        return result

    first = os.environ["DMLC_TASK_ID"] == "0"
    if first:
        kill()
    store = timed("create", kv.create, "dist_sync")
    if first:
        kill()
    timed("init", store.init, "a", np.zeros(100_000, np.float32))
    out = np.zeros(100_000, np.float32)
    for number in range(300):
        if number == 100 and first:
            kill()
        timed("round", store.pushpull, "a", np.full(100_000, store.rank + 1.0, np.float32), out)
    assert (out == 3.0).all()
    timed("barrier", store.barrier)
    assert store.num_dead_nodes() == 0
    if first:
        kill()
    timed("close", store.close)
    print("took", took, flush=True)
"""


@pytest.mark.faults
@pytest.mark.parametrize("transport", ["sockets", "tcp", "zeromq"])
def test_a_scheduler_that_is_killed_again_and_again_delays_no_round(tmp_path: Path, transport: str) -> None:
    options = ("--restarts", "4")
    with job(tmp_path, COUNTS, servers=1, options=options, KVSTORE_TRANSPORT=transport) as running:
        assert running.wait(LONG) == 0, running.output
    line = r"\[scheduler\] the scheduler was lost \(SIGKILL\); its successor took over in \d+\.\d s\n"
    said = re.findall(line, running.output)
    assert len(said) == 4, running.output
    took = [ast.literal_eval(line) for line in re.findall(r"took (\{.*\})", running.output)]
    assert len(took) == 2
    for each in took:
        assert each["round"] < 1.0
        assert max(each.values()) < PROMPT


# ---- a real job that goes on with more servers, which have standbys: the bits of one server


STEPS = 12

TRAINS = """
    import hashlib, os
    import torch
    import kvstore as kv

    OPTIMIZERS = {"sgd": {"momentum": 0.9}, "nag": {"momentum": 0.9}, "adamw": {}, "adafactor": {}}
    SHAPES = {"long": (1013,), "tall": (40_009, 1), "small": (7,)}
    ROWS = (801, 7)  # of an array of which some rows are pushed, and which servers cut within rows

    class Step:
        at = 0
        def state_dict(self):
            return {"at": self.at}
        def load_state_dict(self, state):
            self.at = state["at"]

    step, stores = Step(), {}
    for name, hyper in OPTIMIZERS.items():
        store = stores[name] = kv.create("dist_sync")
        store.set_optimizer(name, learning_rate=0.05, **hyper)
        drawn = torch.Generator().manual_seed(1)
        store.init(list(SHAPES), [torch.randn(shape, generator=drawn) for shape in SHAPES.values()])
        store.init("rows", torch.randn(ROWS, generator=drawn))
        if name == "adamw":
            store.init("table", kv.Table(dim=5, init="normal"))
    stores["sgd"].attach("step", step)
    while step.at < int(os.environ["ROUNDS"]):
        for name, store in stores.items():
            drawn = torch.Generator().manual_seed(100 * store.rank + step.at)
            store.push(list(SHAPES), [torch.randn(shape, generator=drawn) for shape in SHAPES.values()])
            ids = torch.randperm(801, generator=drawn)[:99]
            some = kv.RowSparse(ids, torch.randn(99, 7, generator=drawn), ROWS)
            store.push("rows", some.to_dense() if store.rank and step.at % 4 == 3 else some)
            if name == "adamw":
                ids = torch.randperm(60, generator=drawn)[:20]
                store.push("table", kv.RowSparse(ids, torch.randn(20, 5, generator=drawn)))
        step.at += 1
    for name, store in stores.items():
        outs = [torch.empty(shape) for shape in [*SHAPES.values(), ROWS]]
        store.pull([*SHAPES, "rows"], out=outs)
        if name == "adamw":
            outs.append(store.row_sparse_pull("table", row_ids=torch.arange(60)))
        print("BITS", name, hashlib.sha256(b"".join(out.numpy().tobytes() for out in outs)).hexdigest(), flush=True)
    if "KVSTORE_CHECKPOINT_DIR" in os.environ:
        stores["sgd"].save_checkpoint(wait=True)
"""


def bits(tmp_path: Path, servers: int, rounds: int = STEPS, options: Sequence[str] = ()) -> list[str]:
    """Run a job; return what its workers have said of their bits, each line once."""
    with job(
        tmp_path,
        TRAINS,
        workers=2,
        servers=servers,
        options=options,
        ROUNDS=str(rounds),
        KVSTORE_BIGARRAY_BOUND="500",
        KVSTORE_PIECE_BYTES="4096",
    ) as running:
        assert running.wait() == 0, running.output
        lines = {line[line.index("BITS") :] for line in running.output.splitlines() if "BITS" in line}
        return sorted(lines)


@pytest.mark.faults  # CI has this without processes (tests/kvstore/test_cuts.py), and one process costs it two seconds
def test_the_number_of_servers_changes_no_bit_over_a_checkpoint_and_with_standbys(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    never = bits(tmp_path, 1)
    assert len(never) == 4, never
    bits(tmp_path, 2, STEPS // 2, ["--checkpoint-dir", saved])
    assert bits(tmp_path, 3, options=["--resume", saved, "--replicas", "1"]) == never
    killed = ["--replicas", "1", "--inject", f"kill:server:0@round:{STEPS // 2}"]
    assert bits(tmp_path, 2, options=killed) == never


# ---- workers that die, and a job that goes on without them


FITTED = """
    import os
    import signal
    import sys

    import torch
    from torch import nn

    import kvstore as kv
    import workers
    from workers import Checkpoint, callbacks, fit

    prefix, resumed = sys.argv[0] + ".model", os.path.exists(sys.argv[0] + ".model-0003.safetensors")
    torch.manual_seed(0)
    model, store = nn.Linear(3, 2), kv.create("dist_sync")
    data = [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))] * 2

    def die(epoch, *_):
        if epoch == 1 and store.rank == 0 and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)

    # Worker 0 dies before it has saved the second epoch, and the others save it.
    saving = [die, callbacks.do_checkpoint(prefix)]
    resume = Checkpoint(prefix, 3) if resumed else None
    more = {"kvstore": store, "epoch_end_callback": saving, "resume": resume, "split": False}
    history = fit(model, data, num_epoch=4 if resumed else 3, **more)
    print(f"epochs: {len(history)}")
    workers.init()
    print(f"left: {workers.gather_object(store.rank * 10)}, main: {workers.is_main()}")
"""


@pytest.mark.long
def test_fit_saves_whole_checkpoints_without_worker_0(tmp_path: Path) -> None:
    with job(tmp_path, FITTED, workers=3, servers=1, options=["--min-workers", "2"]) as running:
        assert running.wait() == 0
        assert running.output.count("epochs: 3") == 2
        assert "the job goes on with 2 of 3 workers" in running.output
        assert running.output.count("Saved checkpoint") == 3
        assert [running.output.count(f"left: {{1: 10, 2: 20}}, main: {main}") for main in (True, False)] == [1, 1]
    files = {path.name.partition("model-")[2] for path in tmp_path.glob("*model-*")}
    for epoch in ("0002", "0003"):
        assert {f"{epoch}.{kind}" for kind in ("safetensors", "states", "worker.1", "worker.2")} <= files
        assert f"{epoch}.worker.0" not in files
    with job(tmp_path, FITTED, workers=1, servers=1) as running:
        assert running.wait() == 0
        assert running.output.count("epochs: 1") == 1
        assert "left: {0: 0}, main: True" in running.output
        assert "saved by 2 workers that were left of 3, but there are 1" in running.output


# ---- workers that come back, which the others wait for, and one more


COMING = """
    import os
    import signal
    import time

    import numpy as np
    import kvstore as kv

    class Step:
        at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    store, counts, step = kv.create("dist_sync"), kv.create("dist_sync"), Step()
    store.set_optimizer("sgd", learning_rate=1.0)
    weight, count = np.zeros(3, np.float32), np.zeros(2, np.int64)
    store.init("weight", weight)
    counts.init("count", count)
    store.attach("step", step, shared=True)
    store.on_membership(lambda members: print(f"members {members}", flush=True))
    store.boundary()
    came, of_three = step.at, 0
    while not count[1]:
        if (store.rank, came, step.at) == (1, 0, 20):
            os.kill(os.getpid(), signal.SIGKILL)
        count[:] = 1, int(of_three == 10)  # integers are summed as they are
        counts.pushpull("count", count, out=count)
        store.pushpull("weight", -np.ones(3, np.float32), out=weight)
        step.at += 1
        of_three += int(count[0] == 3)
        store.boundary()
        time.sleep(0.01)
    print(f"CAME {store.rank} {came} {step.at} {weight[0]:.0f} {store.num_workers} {store.members()}", flush=True)
"""


@pytest.mark.long
def test_below_the_least_rounds_stand_still_and_one_more_worker_counts(tmp_path: Path) -> None:
    options = ["--min-workers", "2", "--max-workers", "3", "--restarts", "1"]
    with job(tmp_path, COMING, servers=1, options=options) as running:
        running.until(running.said("members [0, 1]"), "worker 1, which comes back")
        assert "the job waits: 1 of 2 workers are left, and it needs 2 (--min-workers)" in running.output
        assert job_command.main(["add-worker", "--job", f"{running.process.pid}"]) == 0
        assert job_command.main(["add-worker", "--job", f"{running.process.pid}"]) == 1, "there is one already"
        assert running.wait() == 0, running.output
    ends = sorted(line.partition("CAME ")[2] for line in running.output.splitlines() if "CAME" in line)
    found = [list(map(int, line.split()[:5])) for line in ends]
    assert [line.partition("[")[2] for line in ends] == ["0, 1, 2]"] * 3
    assert [each[0] for each in found] == [0, 1, 2]
    assert found[0][1] == 0
    assert 20 <= found[1][1] < 80, "the others would have been much further"
    (last,) = {each[2] for each in found}
    assert {(each[3], each[4]) for each in found} == {(2 * last, 2)}, "each sum stands for two"


# ---- where workers have the weights, one that comes back takes over those of another


HOLDING = """
    import hashlib
    import os
    import signal

    import torch
    from torch import nn
    import kvstore as kv
    import workers

    class Progress:
        step = 0

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            self.step = state["step"]

    store, progress = kv.create("dist_sync"), Progress()
    rank, _ = workers.init(store)
    again = store.newcomer
    make = lambda: nn.Sequential(nn.Linear(100, 500), nn.BatchNorm1d(500), nn.ReLU(), nn.Linear(500, 10))
    one, two = make(), make()  # of other values on each worker
    workers.broadcast_parameters(one)  # as programs for Horovod do
    inner = torch.optim.Adam(one.parameters())
    first = workers.DistributedOptimizer(inner, one.named_parameters())
    adam = {"learning_rate": 0.01}
    second = workers.Trainer(two.named_parameters(), "adam", adam, kv.create("dist_sync"), update_on_kvstore=False)
    first.marks_steps = False  # a step ends with the second one's
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
    for name, thing in {"progress": progress, "scheduler": scheduler}.items():
        store.attach(name, thing, shared=True)
    while progress.step < 12:
        drawn = torch.Generator().manual_seed(100 * rank + progress.step)
        inputs = torch.randn(8, 100, generator=drawn)
        (one(inputs).pow(2).mean() + two(inputs).pow(2).mean()).backward()
        if not again and {1: 4, 0: 8}.get(rank) == progress.step:
            os.kill(os.getpid(), signal.SIGKILL)
        first.step()
        second.step()
        for optimizer in (first, second):
            optimizer.zero_grad()
        scheduler.step()
        progress.step += 1
    second.save_states(states := f"{os.environ['WHERE']}/{rank}.states")
    tensors = [*one.parameters(), *two.parameters(), one[1].num_batches_tracked, two[1].num_batches_tracked]
    tensors += [value for state in inner.state.values() for value in state.values()]
    tensors += [value for _, value in sorted(kv.optim.states_file.read(states)[1].items())]
    bits = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
    print(f"BITS {len(tensors)} {bits} {inner.param_groups[0]['lr']} {again}", flush=True)
"""


@pytest.mark.release
def test_workers_that_hold_the_weights_come_back_with_the_others_bits(tmp_path: Path) -> None:
    options = ["--min-workers", "3", "--restarts", "2"]  # the others stand still meanwhile
    with job(tmp_path, HOLDING, workers=3, servers=2, options=options, WHERE=f"{tmp_path}") as running:
        assert running.wait() == 0, running.output
    ends = [line.partition("BITS ")[2].split() for line in running.output.splitlines() if "BITS" in line]
    assert [end[3] for end in sorted(ends, key=lambda end: end[3])] == ["False", "True", "True"]
    assert len({tuple(end[:3]) for end in ends}) == 1, ends
