"""``python -m simulation 0-9999``: runs of whole jobs in virtual time, by seeds; see ``runs.py``.

``--crashes`` kills each member after each message of one run instead. Ends with 1 if a run was wrong, or hung.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from simulation.runs import HOSTS, Plan, carry_out, crashes, verdict


def main() -> int:
    """Carry the plans out, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("seeds", help="such as 7, or 0-9999")
    parser.add_argument("--crashes", action="store_true", help="kill each member after each message")
    parser.add_argument("--hosts", action="store_true", help="with --crashes: of 4 workers on 2 hosts with aggregators")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # crashes are what this is about
    first, _, last = options.seeds.partition("-")
    verdicts: Counter[str] = Counter()
    began = time.monotonic()
    for seed in range(int(first), int(last or first) + 1):
        for plan in crashes(seed, HOSTS[0] if options.hosts else ()) if options.crashes else (Plan.of(seed),):
            outcome = carry_out(plan)
            said = verdict(plan, outcome)
            verdicts[said if said in ("exact", "loud") else "wrong"] += 1
            if said not in ("exact", "loud"):
                print(f"{plan}: {said}\n{outcome.trace()}", flush=True)
    counted = ", ".join(f"{verdicts[each]} {each}" for each in ("exact", "loud", "wrong"))
    print(f"{counted}, {time.monotonic() - began:.0f} s")
    return 1 if verdicts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
