"""Measure what users are promised: ``python -m tools.trust``, or ``make trust``.

``spec.toml`` lists the promises, with the numbers of trials of the quick and of the full form. A failed trial
is printed with its seed and gives exit code 1. With ``--record`` the outcomes are appended to
``reproduction/records/trust.jsonl`` and the page ``docs/trust.md`` is written from all records.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from reproduction.records import Ledger, provenance
from tools.trust import calibration, cases, faults, load, normalisers, samplers, verdicts
from tools.trust.outcomes import Check, Outcome
from tools.trust.page import ROOT, SPEC, figure, page

CHECKS: dict[str, Check] = {
    name: check
    for module in (faults, cases, load, verdicts, normalisers, samplers, calibration)
    for name, check in module.CHECKS.items()
}
MOST_SHOWN = 10


def measure(name: str, trials: int, seed: int) -> tuple[Outcome, float]:
    """Return the outcome of a check and its seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcome = CHECKS[name](trials, seed, Path(folder))
    return outcome, time.perf_counter() - start


def main() -> None:
    """Run the checks and print one line for each."""
    parser = argparse.ArgumentParser(prog="python -m tools.trust", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="checks to run; all by default")
    parser.add_argument("--full", action="store_true", help="the full numbers of trials; hours")
    parser.add_argument("--trials", type=int, help="another number of trials")
    parser.add_argument("--seed", type=int, default=0, help="the nightly workflow gives the date")
    parser.add_argument("--record", action="store_true", help="keep the outcomes and write the page")
    options = parser.parse_args()
    ledger, failed = Ledger(ROOT / "reproduction", "trust"), False
    for name in options.names or SPEC:
        trials = options.trials or SPEC[name]["full" if options.full else "quick"]
        outcome, seconds = measure(name, trials, options.seed)
        failed |= bool(outcome.failures)
        text = figure(name, outcome)
        line = f"{name}: {outcome.trials} trials, {len(outcome.failures)} failures; {text}"
        shown = "".join(f"\n  {failure}" for failure in outcome.failures[:MOST_SHOWN])
        sys.stdout.write(f"{line} ({seconds:.0f} s, seed {options.seed}){shown}\n")
        sys.stdout.flush()
        if options.record:
            values = {"trials": outcome.trials, "failures": len(outcome.failures), "figure": text}
            values |= {"counts": outcome.counts} if outcome.counts else {}
            cell = {"check": name, "seed": options.seed}
            made = {"seconds": round(seconds, 1), "made_with": provenance()}
            ledger.append({"cell": cell, "values": values, **made})
            (ROOT / "docs" / "trust.md").write_text(page(ledger.records()))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
