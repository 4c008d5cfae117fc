"""``python -m faults 0-199``: runs with these seeds over each kind of links; see ``plan.py`` for what is done to them.

``--signals`` interrupts the workers' calls instead. ``--kills 50`` gives each server a standby and kills so many
servers and standbys in each run, or moves them; see ``killing.py``. Ends with 1 if a run was silently wrong, or hung.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace

from faults import killing, launched
from faults.counting import SAME_BITS, STORES
from faults.killing import Kills
from faults.plan import KINDS, Plan
from faults.runs import carry_out, spread


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("seeds", help="such as 7, or 0-199")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of links; default %(default)s")
    parser.add_argument(
        "--signals", action="store_true", help="exceptions in the middle of calls, by SIGINT and SIGALRM"
    )
    parser.add_argument("--rounds", type=int, help="that a worker trains; default what a seed's plan says")
    parser.add_argument("--kills", type=int, default=0, help="of servers with standbys, in each run")
    parser.add_argument("--modes", default=",".join(STORES), help="with --kills: of stores; default %(default)s")
    parser.add_argument("--whom", default="server,standby", help="with --kills: roles; default %(default)s")
    parser.add_argument("--stop", type=float, default=0.0, help="with --kills: stop for so many seconds instead")
    parser.add_argument("--move", action="store_true", help="with --kills --launch: move them instead of killing")
    parser.add_argument("--launch", action="store_true", help="with --kills: by launch.py, instead of forks")
    options = parser.parse_args()
    if options.kills:
        return _kill(options)
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


def _kill(options: argparse.Namespace) -> int:
    first, _, last = options.seeds.partition("-")
    wrong = 0
    whom = tuple(options.whom.split(","))
    for kind in options.kinds.split(","):
        after_s: list[float] = []
        others_s: list[float] = []
        runs = 0
        for seed in range(int(first), int(last or first) + 1):
            for mode in options.modes.split(","):
                kills = Kills(seed, kind, mode, options.kills, whom, options.stop, options.move)
                result = launched.carry_out(kills) if options.launch else killing.carry_out(kills)
                if not result.wrong and mode in SAME_BITS and killing.undisturbed(kills, result.rounds) != result.bits:
                    result.wrong = "other bits than in the undisturbed run"
                runs += 1
                after_s += result.after_s
                others_s += result.others_s
                if result.wrong:
                    wrong += 1
                    print(f"{kills}: {result.wrong}\n{result.output[-6000:]}", flush=True)
                else:
                    print(f"{kind} {mode} {seed}: exact, {result.rounds} rounds", flush=True)
        for whose, times in (("serving", after_s), ("other", others_s)):
            if times:
                print(
                    f"{kind}: {len(times)} kills of {whose} processes in {runs} runs; to the end of the next round: "
                    f"{spread(times, 2)}",
                    flush=True,
                )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
