"""``python -m simulation 0-9999``: runs of whole jobs in virtual time, by seeds; see ``runs.py``.

``--crashes`` kills each member after each message of one run instead. ``--replicas`` gives each server a standby; see
``takeovers.py``. With ``--tables`` workers push rows of tables then. ``--losses`` lets jobs go on without workers that
die; see ``losses.py``. ``--returns`` starts these again; see ``returns.py``. Ends with 1 if a run was wrong, or hung.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from simulation import losses, returns
from simulation.job import Outcome
from simulation.runs import HOSTS, WORKERS, Plan, carry_out, crashes, exhaustive, verdict
from simulation.takeovers import judge, replicated, short, with_tables


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("seeds", help="such as 7, or 0-9999")
    parser.add_argument("--crashes", action="store_true", help="kill each member after each message")
    parser.add_argument("--hosts", action="store_true", help="with --crashes: of 4 workers on 2 hosts with aggregators")
    parser.add_argument("--replicas", action="store_true", help="each server has a standby")
    parser.add_argument("--tables", action="store_true", help="with --replicas: of programs with tables")
    parser.add_argument("--losses", action="store_true", help="jobs go on without workers that die")
    parser.add_argument("--returns", action="store_true", help="jobs in which workers that die are started again")
    parser.add_argument("--step", type=int, default=1, help="with --crashes and --replicas: after each n-th message")
    parser.add_argument("--most", type=int, default=10, help="traces that are printed; default %(default)s")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # crashes are what this is about
    first, _, last = options.seeds.partition("-")
    verdicts: Counter[str] = Counter()
    began = time.monotonic()
    for seed in range(int(first), int(last or first) + 1):
        for plan in _plans(options, seed):
            said, outcome = _carry_out(plan)
            verdicts[said if said in ("exact", "loud") else "wrong"] += 1
            if said not in ("exact", "loud"):
                print(f"{plan}: {said}", flush=True)
                if verdicts["wrong"] <= options.most:
                    print(outcome.trace(), flush=True)
    counted = ", ".join(f"{verdicts[each]} {each}" for each in ("exact", "loud", "wrong"))
    print(f"{counted}, {time.monotonic() - began:.0f} s")
    return 1 if verdicts["wrong"] else 0


def _carry_out(plan: Plan) -> tuple[str, Outcome]:
    if plan.least:
        run = (returns if plan.returns else losses).Run(plan)
        return run.verdict, run.outcome
    outcome = carry_out(plan)
    return (judge if plan.replicas else verdict)(plan, outcome), outcome


def _plans(options: argparse.Namespace, seed: int) -> Iterator[Plan]:
    hosts = HOSTS[0] if options.hosts else ()
    chosen = with_tables if options.tables else lambda plan: plan
    if options.returns and options.crashes:
        for plan in (returns.BASE, replace(returns.BASE, crashes=(("worker 2", 120),))):
            plan = replace(plan, seed=seed, replicas=int(options.replicas), shares=options.replicas)
            plan = replace(plan, program="return rows") if options.tables else plan
            yield from exhaustive(plan, WORKERS, step=options.step, run=returns.outcome_of)
    elif options.returns:
        yield returns.returning(seed)
    elif options.losses and options.crashes:
        for plan in losses.short(seed):
            plan = replace(plan, replicas=int(options.replicas), shares=options.replicas)
            plan = replace(plan, program="survive rows") if options.tables else plan
            yield from exhaustive(plan, WORKERS, step=options.step, run=losses.outcome_of)
    elif options.losses:
        yield losses.lossy(seed)
    elif options.crashes and options.replicas:
        for plan in short(seed, hosts):
            yield from exhaustive(chosen(plan), step=options.step)
    elif options.crashes:
        yield from crashes(seed, hosts)
    else:
        yield chosen(replicated(seed)) if options.replicas else Plan.of(seed)


if __name__ == "__main__":
    sys.exit(main())
