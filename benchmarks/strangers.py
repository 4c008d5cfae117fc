"""``python -m benchmarks.strangers``: what strangers cost a job over plain TCP, with two workers and two servers.

Each kind of stranger is one process that sends as fast as it can. It uses one of the machine's cores unless it is made
to wait. The rounds per second with and without it are compared.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys

from benchmarks.contenders import TRANSPORTS, launched
from benchmarks.jobs import Member, run, scratch
from benchmarks.programs.stranger import KINDS, MARK

NOBODY = "nobody"


def rounds_a_second(kind: str, net: str, rounds: int) -> tuple[float, dict[str, float]]:
    """Return the rounds per second while strangers of a kind attack, and the strangers' own figures."""
    with scratch() as folder:
        report, attack, mark = folder / "report", folder / "attack", secrets.token_hex(8)
        program = [sys.executable, "-m", "benchmarks.programs.rounds", "--net", net, "--rounds", str(rounds)]
        env = {**TRANSPORTS["tcp"], MARK: mark}
        members = [launched(2, 2, [*program, "--report", str(report)], env)]
        if kind != NOBODY:
            words = [kind, "--mark", mark, "--report", str(attack)]
            members.append(Member(kind, [sys.executable, "-m", "benchmarks.programs.stranger", *words]))
        times = run(members, report)["times"]
        return 1000 * len(times) / sum(times), {} if kind == NOBODY else json.loads(attack.read_text())


def main() -> None:
    """Measure each kind in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", default="2MB", help="the arrays of a round, as for other benchmarks")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.repeats):
        alone = 0.0
        for kind in (NOBODY, *KINDS):
            rate, attack = rounds_a_second(kind, args.net, args.rounds)
            alone = alone or rate
            said = "".join(f", {name} {value:.1f}" for name, value in attack.items())
            print(f"{kind:8} {rate:7.1f} rounds/s, {rate / alone:4.0%}{said}", flush=True)


if __name__ == "__main__":
    main()
