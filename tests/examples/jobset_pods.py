"""What a cluster makes of a JobSet and of a TrainJob: pods, with their commands and environments.

The rules are those of JobSet 0.6 to 0.13, Kubeflow Trainer 2.0 to 2.3 and Kubernetes' Indexed Jobs, as far as our
manifests need them.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

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
