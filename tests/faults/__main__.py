"""``python -m faults 0-199``: runs with these seeds over each kind of links; see ``plan.py`` for what is done to them.

``--signals`` interrupts the workers' calls instead. Ends with 1 if a run was silently wrong, or hung.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace

from faults.plan import KINDS, Plan
from faults.runs import carry_out


def main() -> int:
    """Carry the plans out, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("seeds", help="such as 7, or 0-199")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of links; default %(default)s")
    parser.add_argument(
        "--signals", action="store_true", help="exceptions in the middle of calls, by SIGINT and SIGALRM"
    )
    parser.add_argument("--rounds", type=int, help="that a worker trains; default what a seed's plan says")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    silent = 0
    for kind in options.kinds.split(","):
        verdicts: Counter[str] = Counter()
        interrupts = kills = 0
        began = time.monotonic()
        for seed in range(int(first), int(last or first) + 1):
            plan = (Plan.interrupting if options.signals else Plan.of)(seed, kind)
            if options.rounds is not None:
                plan = replace(plan, rounds=options.rounds)
            outcome = carry_out(plan)
            verdicts[outcome.verdict] += 1
            interrupts += outcome.interrupts
            kills += plan.kills
            if outcome.verdict == "silent" or (outcome.verdict == "loud" and not plan.kills):
                print(f"{kind} {seed}: {outcome.verdict}: {outcome.why}\n{plan}\n{outcome.output}", flush=True)
        silent += verdicts["silent"]
        print(
            f"{kind}: {verdicts['exact']} exact, {verdicts['loud']} loud ({kills} plans have a kill), "
            f"{verdicts['silent']} silent, {interrupts} interrupts, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
