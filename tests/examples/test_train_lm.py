"""train_lm.py: in this process, and as a job of two workers."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest
import train_lm
from scripts import launch, lines_of

TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 8 --steps 12 --eval-every 6 --lr 0.01 --sample 8"


def test_what_the_user_can_mend_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "--text", f"{tmp_path / 'none'}", "--kv-store", "local"])
    with pytest.raises(SystemExit, match=r"^train_lm\.py: error: cannot read the text: "):
        train_lm.main()


def bits_of(lines):
    """The bits per character that each look at held-out text has found."""
    return [float(bits) for line in lines for bits in re.findall(r"^Step.* Validation-bits=(\S+) ", line)]


def test_one_process_learns(song, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    log = tmp_path / "run.jsonl"
    words = [*TINY.split(), "--text", str(song), "--kv-store", "local", "--log-to", str(log)]
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *words])
    train_lm.main()
    before, after = bits_of(caplog.messages)
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["step"], f"{row['validation/bits']:.3f}") for row in logged] == [
        (6, f"{before:.3f}"),
        (12, f"{after:.3f}"),
    ]
    assert after < before < math.log2(11)
    assert caplog.messages[-1].startswith("Sample: ")


DILOCO = "--inner-steps 4 --fragments 2 --overlap 2 --outer-lr 1 --outer-momentum 0"


def test_alone_with_diloco(song, monkeypatch, caplog):
    caplog.set_level("INFO")
    words = [*TINY.split(), *DILOCO.split(), "--text", str(song), "--kv-store", "local"]
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *words])
    train_lm.main()
    before, after = bits_of(caplog.messages)
    assert after < before < math.log2(11)


@pytest.mark.release
def test_two_workers_learn(song):
    process = launch(f"train_lm.py {TINY} --text {song}", workers=2, servers=2)
    assert process.returncode == 0, process.stdout
    before, after = bits_of(lines_of(process, 0))
    assert after < before < math.log2(11)
    assert any(re.fullmatch("Sample: .{8,}", line) for line in lines_of(process, 0))
    assert lines_of(process, 1) == []
