"""The objects of a job."""

from __future__ import annotations

import base64
import dataclasses
import json
import warnings
from typing import Any

import pytest
from pod_jobs import FULL, HOSTILE, RAW, job, made

from kvstore.job.curve_keys import Keyring
from launcher.errors import LaunchError
from launcher.job.description import Cluster
from launcher.job.tasks import members
from launcher.kinds.pods.manifests import hidden, manifests


@pytest.mark.parametrize("options", [{}, {"cluster": FULL, "env_worker": {"W": HOSTILE}}])
def test_kubernetes_knows_every_field(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kubernetes import client
    for manifest in (shape(each) for each in made(job(**options)) for shape in (dict, hidden)):
        api = client.ApiClient()
        text = json.dumps(manifest)
        known = api.deserialize(text, f"V1{manifest['kind']}", "application/json")
        assert api.sanitize_for_serialization(known) == manifest


def test_a_pod_mounts_its_own_key_alone() -> None:
    one = job()
    keyring = Keyring.random(members(one))
    objects = manifests(one, "n", keyring, {})
    secrets = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Secret"}
    assert {name: base64.b64decode(value).decode() for name, value in secrets["n-keys"]["data"].items()} == {
        f"{role}-{rank}": keyring.variables(role, rank)["KVSTORE_SECRET_KEY"] for role, rank in members(one)
    }
    shown = json.dumps([each for each in objects if each["kind"] != "Secret"])
    assert not any(pair[1] in shown for pair in keyring.pairs.values())
    for role in ("scheduler", "server", "worker"):
        assert set(secrets[f"n-{role}"]["data"]) == {"KVSTORE_ROOT_KEY", "KVSTORE_MEMBER_KEYS"}
    *_, pod = (each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Job")
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "keys")
    assert mount["subPathExpr"] == "worker-$(JOB_COMPLETION_INDEX)"


def test_nobody_sets_what_is_computed_even_by_the_callers_environment() -> None:
    one = job(env_names=("DMLC_ROLE", "TOKEN"), cluster={"encryption": False})
    secrets = [each for each in made(one, {"DMLC_ROLE": "worker", "TOKEN": "t"}) if each["kind"] == "Secret"]
    assert [set(each["data"]) for each in secrets] == [{"TOKEN"}] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": Cluster()}, "--image"),
        ({"command": ("python 'x",)}, "do not match"),
        ({"command": ("echo", RAW)}, "UTF-8"),
        ({"cluster": Cluster(image="i", time="90")}, "2:00:00"),
        ({"env_worker": {"BIG": "x" * 800_000}}, "1 MiB"),
    ],
)
def test_what_cannot_be_put_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        made(dataclasses.replace(job(), **options))
