"""The manifests for Kubernetes and SkyPilot."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import ROOT, Launched
from launched import launch as launch_process
from waiting import LONG

from launcher.kinds.pods.entry import compose

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
Manifest = dict[str, Any]


def load(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


@dataclass
class Pod:
    """A pod of one container."""

    host: str
    image: str
    command: list[str]
    env: dict[str, str] = field(repr=False)


def pods(jobset: Manifest, secrets: dict[str, dict[str, str]], address: str) -> list[Pod]:
    """The pods of a JobSet.

    Args:
        jobset: the JobSet.
        secrets: the values of Secrets by name and key.
        address: the IP address of all pods.
    """
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    made = []
    for replicated in spec["replicatedJobs"]:
        job = replicated["template"]["spec"]
        assert replicated.get("replicas", 1) == 1
        assert job["completions"] == job["parallelism"]
        (container,) = job["template"]["spec"]["containers"]
        for index in range(job["completions"]):
            coordinator = spec["coordinator"]
            metadata = {
                "labels": {
                    "jobset.sigs.k8s.io/jobset-name": name,
                    "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                },
                "annotations": {"jobset.sigs.k8s.io/coordinator": f"{name}-{coordinator['replicatedJob']}-0-0.{name}"},
            }
            env = {}
            for variable in container.get("env", []):
                source = variable.get("valueFrom", {})
                if "secretKeyRef" in source:
                    value = secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
                elif "fieldRef" in source:
                    value = _field(source["fieldRef"]["fieldPath"], metadata, address)
                else:
                    value = variable["value"]
                env[variable["name"]] = value
            env["JOB_COMPLETION_INDEX"] = str(index)
            host = f"{name}-{replicated['name']}-0-{index}.{name}"
            made.append(Pod(host, container["image"], container["command"], env))
    return made


def _field(path: str, metadata: dict[str, dict[str, str]], address: str) -> str:
    if path == "status.podIP":
        return address
    found = re.fullmatch(r"metadata\.(labels|annotations)\['([\w./-]+)'\]", path)
    assert found is not None, path
    return metadata[found[1]][found[2]]


def jobset_of(runtime: Manifest, trainjob: Manifest) -> Manifest:
    """The JobSet that Trainer makes of a TrainJob and the runtime that it names; for a runtime without a framework."""
    reference, trainer = trainjob["spec"]["runtimeRef"], trainjob["spec"]["trainer"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    nodes = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    (workers,) = (
        replicated["template"]
        for replicated in spec["replicatedJobs"]
        if replicated["template"]
        .get("metadata", {})
        .get("labels", {})
        .get("trainer.kubeflow.org/trainjob-ancestor-step")
        == "trainer"
    )
    workers["spec"].update(completions=nodes, parallelism=nodes)
    (node,) = (each for each in workers["spec"]["template"]["spec"]["containers"] if each["name"] == "node")
    node.update({name: trainer[name] for name in ("image", "command", "args") if name in trainer})
    node["env"] += trainer.get("env", [])
    return {"metadata": {"name": trainjob["metadata"]["name"]}, "spec": spec}


# ---- the manifests in examples/kubernetes: the official models know every field, and pods find out what they are


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


# ---- the task in examples/skypilot: its command, with the variables that SkyPilot sets on each node


FILE = ROOT / "examples" / "skypilot" / "train.yaml"


def task() -> dict[str, Any]:
    loaded = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_the_secret_is_not_in_the_file_and_the_program_is_in_the_clone() -> None:
    described = task()
    assert described["secrets"] == {"KVSTORE_JOB_SECRET": None}
    assert (described["num_nodes"], described["workdir"]) == (2, ".")
    (program,) = (word for word in described["run"].split() if word.endswith(".py"))
    assert (ROOT / program).is_file()


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_is_told_where_the_nodes_meet_and_which_one_this_is(rank: int, tmp_path: Path) -> None:
    """How workers fare that torchrun has started so, tests/integration/test_started_elsewhere.py shows."""
    from torch.distributed.run import config_from_args, parse_args

    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SKYPILOT_NODE_RANK": str(rank)}
    environ |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    words = subprocess.check_output(["/bin/bash", "-c", task()["run"]], env=environ, text=True).splitlines()
    config, _, arguments = config_from_args(parse_args(words))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 1)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.rdzv_configs["rank"]) == (
        "static",
        "10.0.0.1:29500",
        rank,
    )
    assert arguments[-3:] == ["examples/train_lm.py", "--steps", "200"]
