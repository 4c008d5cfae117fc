"""The manifests in examples/kubernetes: the official models know every field, and pods find out what they are."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from jobset_pods import Pod, jobset_of, load, pods
from launched import ROOT, Launched
from launched import launch as launch_process
from waiting import LONG

from launcher.kinds.pods.entry import compose

SECRETS = {"kvstore": {"secret": "s" * 32}}
FILES = ("jobset.yaml", "trainjob.yaml", "trainjob-servers.yaml")


def jobset() -> dict[str, Any]:
    (manifest,) = load("jobset.yaml")
    return manifest


def of_trainjob() -> dict[str, Any]:
    return jobset_of(*load("trainjob-servers.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_kubeflows_models_know_every_field(name: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    kinds = {
        "JobSet": ("jobset.x-k8s.io/v1alpha2", models.JobsetV1alpha2JobSet),
        "TrainingRuntime": ("trainer.kubeflow.org/v1alpha1", models.TrainerV1alpha1TrainingRuntime),
        "TrainJob": ("trainer.kubeflow.org/v1alpha1", models.TrainerV1alpha1TrainJob),
    }
    for manifest in load(name):
        version, model = kinds[manifest["kind"]]
        assert manifest["apiVersion"] == version
        assert model.from_dict(manifest).to_dict() == manifest


def parts(name: str) -> list[tuple[str, Any]]:
    """What in a manifest Kubernetes itself has a model for, with the name of the model."""
    found: list[tuple[str, Any]] = []
    for manifest in load(name):
        spec = manifest["spec"]
        trainer = spec.get("trainer", {})
        found += [("V1EnvVar", variable) for variable in trainer.get("env", [])]
        found += [("V1ResourceRequirements", trainer["resourcesPerNode"])] if trainer else []
        template = spec.get("template", {}).get("spec", spec)
        found += [("V1JobTemplateSpec", each["template"]) for each in template.get("replicatedJobs", [])]
    return found


@pytest.mark.parametrize("name", FILES)
def test_kubernetes_knows_every_field(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kubernetes import client
    api = client.ApiClient()
    assert parts(name)
    for model, part in parts(name):
        assert api.sanitize_for_serialization(api.deserialize(json.dumps(part), model, "application/json")) == part


@pytest.mark.parametrize("made", [jobset, of_trainjob])
def test_each_pod_finds_out_what_it_is(made: Any, tmp_path: Path) -> None:
    members = pods(made(), SECRETS, "10.0.0.1")
    tasks = [compose(pod.command[1:], pod.env, tmp_path) for pod in members]
    assert {pod.command[0] for pod in members} == {"kvstore-pod"}
    expected = [("scheduler", 0), ("server", 0), ("server", 1), *(("worker", rank) for rank in range(4))]
    assert [(task.role, task.rank) for task in tasks] == expected
    for pod, task in zip(members, tasks, strict=True):
        env = task.env
        assert (env["DMLC_NUM_WORKER"], env["DMLC_NUM_SERVER"], env["DMLC_NODE_HOST"]) == ("4", "2", "10.0.0.1")
        assert env["DMLC_PS_ROOT_URI"] == ("10.0.0.1" if task.role == "scheduler" else members[0].host)
        assert (env["DMLC_ROLE"], env["DMLC_TASK_ID"], env["KVSTORE_JOB"]) == (task.role, str(task.rank), "train")
        assert "KVSTORE_JOB_SECRET" not in env
        assert pod.image == f"registry.example/{'train:1' if task.role == 'worker' else 'kvstore:cpu'}"
    assert len({task.env["KVSTORE_SECRET_KEY"] for task in tasks}) == len(tasks)
    assert len({(task.env["KVSTORE_ROOT_KEY"], task.env["KVSTORE_MEMBER_KEYS"]) for task in tasks}) == 1
    assert tasks[-1].argv[-1] == "train.py"


def test_torchrun_understands_what_trainer_says_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import config_from_args, parse_args

    (manifest,) = load("trainjob.yaml")
    trainer = manifest["spec"]["trainer"]
    told = {"NNODES": "4", "NPROC_PER_NODE": "1", "NODE_RANK": "2", "MASTER_ADDR": "train-node-0-0.train"}
    for name, value in {**told, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    program, *words = trainer["command"]
    config, _, arguments = config_from_args(parse_args(words))
    assert (program, config.min_nodes, config.max_nodes, config.nproc_per_node) == ("torchrun", 4, 4, 1)
    assert (config.rdzv_endpoint, config.rdzv_configs["rank"]) == ("train-node-0-0.train:29500", 2)
    assert arguments[-1] == "train.py"
    assert {variable["name"] for variable in trainer["env"]} == {"KVSTORE_JOB_SECRET", "DMLC_NUM_SERVER"}


WORKER = """
import kvstore as kv, numpy as np
store = kv.create("dist_sync")
store.init("w", np.zeros(3, np.float32))
out = np.zeros(3, np.float32)
store.pushpull("w", np.full(3, store.rank + 1, np.float32), out=out)
print("rank", store.rank, "sum", out[0])
"""
POD = "import sys; from launcher.kinds.pods.entry import main; sys.exit(main())"


def smaller(manifest: dict[str, Any]) -> dict[str, Any]:
    """The same JobSet with one server and two workers."""
    counts = {"server": 1, "worker": 2}
    for replicated in manifest["spec"]["replicatedJobs"]:
        job = replicated["template"]["spec"]
        count = counts.get(replicated["name"], 1)
        job.update(completions=count, parallelism=count)
        for variable in job["template"]["spec"]["containers"][0]["env"]:
            if variable["name"].startswith("DMLC_NUM_"):
                variable["value"] = str(counts[variable["name"].rpartition("_")[2].lower()])
    return manifest


@pytest.mark.release
def test_a_jobset_trains(tmp_path: Path) -> None:
    """Its pods are processes of this machine. The address that all have is one of the loopback's."""
    (tmp_path / "train.py").write_text(WORKER)
    address = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    members = pods(smaller(jobset()), SECRETS, address)
    running = [started(pod, members[0].host, address, tmp_path, number) for number, pod in enumerate(members)]
    try:
        codes = [one.wait(LONG) for one in running]
    finally:
        for one in running:
            one.end()
    said = [one.out + one.err for one in running]
    assert codes == [0] * 4, said
    assert said[2:] == ["rank 0 sum 3.0\n", "rank 1 sum 3.0\n"]
    assert said[:2] == ["", ""]  # nothing of links without keys


def started(pod: Pod, scheduler: str, address: str, folder: Path, number: int) -> Launched:
    """The pod as a process, where the scheduler's name is found in the DNS."""
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environ |= {"PYTHONPATH": str(ROOT), "KVSTORE_TIMEOUT_S": str(LONG), **pod.env}
    if environ["DMLC_PS_ROOT_URI"] == scheduler:
        environ["DMLC_PS_ROOT_URI"] = address
    directory, token = folder / str(number), f"pod-{number}-{os.getpid()}"
    words = [sys.executable, "-c", POD, *pod.command[1:]]
    return Launched(launch_process(words, environ, token, folder, directory), directory, token)
