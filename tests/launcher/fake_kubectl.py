"""A stand-in for kubectl and its cluster: pods are processes of this machine, in the directory FAKE_CLUSTER.

It does with a manifest what Kubernetes would: mounts Secrets, expands `$(NAME)`, tells a pod its number. What it prints
has the shape that kubectl's output has. With a file called cut, each log ends once after its first lines; with one
called refuse, nothing can be created, for the reason in it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HOME = Path(os.environ["FAKE_CLUSTER"])
ADDRESS = os.environ["FAKE_ADDRESS"]
RUN = '"$@" >log 2>&1 & echo $! >pid; wait $!; echo $? >rc.new; mv rc.new rc'


def expand(text: str, env: dict[str, str]) -> str:
    """What Kubernetes makes of words and values."""

    def replace(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return env.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def create(objects: list[dict[str, Any]]) -> None:
    secrets = {item["metadata"]["name"]: item["data"] for item in objects if item["kind"] == "Secret"}
    for number, item in enumerate(objects):
        (HOME / f"object-{number}.json").write_text(json.dumps(item))
        if item["kind"] == "Job":
            for index in range(item["spec"]["completions"]):
                pod(item["metadata"]["name"], item["spec"]["template"], index, secrets)


def pod(job: str, template: dict[str, Any], index: int, secrets: dict[str, dict[str, str]]) -> None:
    (container,) = template["spec"]["containers"]
    home = HOME / f"pod-{job}-{index}-abcde"
    (home / "mount").mkdir(parents=True)
    (home / "pod.json").write_text(json.dumps({"labels": template["metadata"]["labels"], "index": index}))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"], "JOB_COMPLETION_INDEX": str(index)}
    for entry in container["env"]:
        env[entry["name"]] = ADDRESS if "valueFrom" in entry else expand(entry["value"], env)
    if env["DMLC_PS_ROOT_URI"].endswith(template["spec"]["subdomain"]):
        env["DMLC_PS_ROOT_URI"] = ADDRESS  # the DNS
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    for mount in container["volumeMounts"]:
        if "secret" in volumes[mount["name"]]:
            data = secrets[volumes[mount["name"]]["secret"]["secretName"]]
            place = home / "mount" / Path(mount["mountPath"]).name
            if "subPathExpr" in mount:
                place.write_bytes(base64.b64decode(data[expand(mount["subPathExpr"], env)]))
                continue
            (place / "..data").mkdir(parents=True)
            for name, value in data.items():
                (place / name).write_bytes(base64.b64decode(value))
    code = container["command"][2].replace("main()", f"main(None, {str(home / 'mount')!r})")
    words = [sys.executable, container["command"][1], code, *(expand(word, env) for word in container.get("args", []))]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(["/bin/sh", "-c", RUN, "sh", *words], cwd=home, env=env, start_new_session=True, **quiet)


def describe(home: Path) -> dict[str, Any]:
    known = json.loads((home / "pod.json").read_text())
    metadata = {
        "name": home.name.removeprefix("pod-"),
        "labels": known["labels"],
        "annotations": {"batch.kubernetes.io/job-completion-index": str(known["index"])},
    }
    if (home / "rc").exists():
        finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((home / "rc").stat().st_mtime))
        end = {"exitCode": int((home / "rc").read_text()), "reason": "Error", "finishedAt": finished}
        return {"metadata": metadata, "status": {"containerStatuses": [{"state": {"terminated": end}}]}}
    return {"metadata": metadata, "status": {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}}


def logs(home: Path, follow: bool) -> None:
    shown = 0
    while True:
        over = (home / "rc").exists() or not home.exists()
        lines = (home / "log").read_bytes().split(b"\n")[:-1] if (home / "log").exists() else []
        for number, line in enumerate(lines[shown:], shown):
            sys.stdout.buffer.write(b"2024-01-01T00:00:00.%09dZ %s\n" % (number, line))
        sys.stdout.flush()
        if follow and lines and (HOME / "cut").exists() and not (home / "was-cut").exists():
            (home / "was-cut").touch()
            return
        shown = len(lines)
        if over or not follow:
            return
        time.sleep(0.02)


def delete(kinds: str) -> None:
    for home in HOME.glob("pod-*"):
        if (home / "pid").exists() and not (home / "rc").exists():
            with suppress(ProcessLookupError):
                os.killpg(os.getpgid(int((home / "pid").read_text())), signal.SIGKILL)
        home.rename(HOME / home.name.replace("pod-", "gone-"))
    for file in HOME.glob("object-*.json"):
        if f"{json.loads(file.read_text())['kind'].lower()}s" in kinds.split(","):
            file.unlink()


def main(argv: list[str]) -> None:
    with (HOME / "commands").open("a") as file:
        file.write(" ".join(argv) + "\n")
    if argv[0] == "create":
        if (HOME / "refuse").exists():
            sys.exit((HOME / "refuse").read_text())
        create(json.load(sys.stdin)["items"])
    elif argv[0] == "get":
        print(json.dumps({"items": [describe(home) for home in sorted(HOME.glob("pod-*"))]}, indent=4))
    elif argv[0] == "logs":
        logs(HOME / f"pod-{argv[1]}", "--follow" in argv)
    else:
        delete(argv[1])


if __name__ == "__main__":
    main(sys.argv[1:])
