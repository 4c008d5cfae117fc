"""YAML is what it was made from."""

from __future__ import annotations

import yaml
from pod_jobs import FULL, HOSTILE, job, made

from launcher.kinds.pods.yaml import dump


def test_the_yaml_is_what_it_was_made_from() -> None:
    everything = [*made(job(cluster=FULL, env_worker={"W": HOSTILE}, command=(HOSTILE, "yes", "1", "null", "~", "")))]
    assert list(yaml.safe_load_all("---\n".join(map(dump, everything)))) == everything
    odd = {"empty": [], "none": {}, "text": "", "nested": [[1, 2], [{"a": [True]}]], "on": "off", "1": "1.5"}
    assert yaml.safe_load(dump(odd)) == odd
