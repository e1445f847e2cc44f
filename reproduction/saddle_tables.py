"""Tables about the saddle point: other spaces of f, the convergence theorem, intractable normalisers."""

import numpy as np

from reproduction.records import Record, chosen, good
from reproduction.tables import (
    NOTHING,
    count,
    gaps_to_exact,
    label,
    markdown,
    mean,
    mean_and_error,
    most,
    number,
    power_law,
    slope_text,
)

__all__ = ["MOST_ERROR", "arrival", "normalised", "reach", "spaces", "standing", "stationarity"]

# A likelihood is shown if its normaliser is known to so many nats, by repetitions and by draws of the truth.
MOST_ERROR = 0.3
# The distance of samples by draws that are many enough to tell the exact solution's from others.
RESOLVED = "mmd_resolved"
# Nats that count as near, the level of the test of calibration, and one over the true shares of the circles
# of the rings.
NEAR, PIT_LEVEL, CIRCLES = 0.05, 0.01, (9.0, 3.0, 1.8)


def standing(records: dict[str, list[Record]]) -> str:
    """Return the paper's algorithm against the exact solution: the worst draw of every set, and its cost."""
    return f"{_standing_of_samples(records['table1'])}\n\n{_standing_of_conditionals(records['table2'])}"


def _standing_of_samples(records: list[Record]) -> str:
    rows = []
    for dim, dataset in sorted(
        {(r["cell"]["dim"], r["cell"]["dataset"]) for r in good(records, method="dde")}
    ):
        here = chosen(records, dim=dim, dataset=dataset)
        dde, rivals = (
            good(here, method="dde"),
            {r["cell"]["seed"]: r["values"] for r in good(here, method="exact")},
        )
        pairs = [(r["values"], rivals[r["cell"]["seed"]]) for r in dde if r["cell"]["seed"] in rivals]
        further = [
            1e3 * (ours[RESOLVED] - exact[RESOLVED])
            for ours, exact in pairs
            if RESOLVED in ours and RESOLVED in exact
        ]
        shares = [
            abs(share * whole - 1.0)
            for r in dde
            for share, whole in zip(r["values"].get("shares", ()), CIRCLES, strict=False)
        ]
        rows.append(
            [
                f"{dataset}, {dim}-D",
                count(chosen(here, method="dde")),
                _signed(gaps_to_exact(here, "dde"), 3),
                _signed(further, 2),
                f"{max(shares):.0%}" if shares else NOTHING,
                f"{sum(r['values']['status'] == 'CONVERGED' for r in dde)} of {len(dde)}",
                most(dde, "processor_seconds"),
            ]
        )
    names = (
        "data",
        "draws",
        "NLL − exact",
        "MMD² ×10³ − exact's",
        "share of a circle off by",
        "says it has converged",
    )
    return markdown((*names, "processor s"), rows)


def _standing_of_conditionals(records: list[Record]) -> str:
    """Return the counts of conditional sets near the exact solution, and with a calibrated sampler."""
    dde = good(records, method="dde")
    sets = list(dict.fromkeys(record["cell"]["dataset"] for record in dde))
    gaps = {name: gaps_to_exact(chosen(records, dataset=name), "dde") for name in sets}
    far = {name: max(found) for name, found in gaps.items() if found and max(found) > NEAR}
    values = lambda name: [record["values"]["sampler_ks_p_value"] for record in good(dde, dataset=name)]
    failing = [f"{name} ({min(values(name)):.3f})" for name in sets if min(values(name)) < PIT_LEVEL]
    row = [
        str(len(sets)),
        f"{sum(bool(found) for found in gaps.values()) - len(far)}",
        ", ".join(f"{name} {gap:+.2f}" for name, gap in far.items()) or NOTHING,
        f"{len(sets) - len(failing)}",
        ", ".join(failing) or NOTHING,
        most(dde, "processor_seconds"),
    ]
    names = (
        "conditional sets",
        f"NLL within {NEAR} of exact",
        "not",
        f"PIT of plain draws passes at {PIT_LEVEL}",
        "not",
    )
    return markdown((*names, "processor s, worst"), [row] if sets else [])


def _signed(values: list[float], digits: int) -> str:
    """Return the largest of some differences."""
    return f"{max(values):+.{digits}f}" if values else NOTHING


def spaces(records: list[Record]) -> str:
    """Return the paper's algorithm beside the exact solution in each space of f."""
    rows = []
    for space in dict.fromkeys(record["cell"]["space"] for record in records):
        here = chosen(records, space=space)
        exact, dde = good(here, method="exact"), good(here, method="dde")
        gaps = gaps_to_exact(here, "dde")
        rows.append(
            [
                space,
                count(chosen(here, method="dde")),
                mean(exact, "nll", 3),
                mean(dde, "nll", 3),
                f"{max(gaps):+.3f}" if gaps else NOTHING,
                mean(exact, "mmd", 2, factor=1e3),
                mean(dde, "mmd", 2, factor=1e3),
                mean(dde, "processor_seconds", 0),
            ]
        )
    names = (
        "f in",
        "draws",
        "NLL, exact",
        "NLL, DDE alone",
        "DDE − exact, worst",
        "MMD² ×10³, exact",
        "MMD² ×10³, DDE alone",
    )
    return markdown((*names, "processor s, DDE alone"), rows)


def stationarity(records: list[Record]) -> str:
    """Return the mean squared gradient for each number of steps, and its slope in logarithms."""
    sizes = sorted({record["cell"]["steps"] for record in records})
    rows = []
    for method in dict.fromkeys(record["cell"]["method"] for record in records):
        mine = good(records, method=method)
        means = [mean_and_error(good(mine, steps=size), "squared_gradient", 4) for size in sizes]
        folding = max((record["values"]["folding_share"] for record in mine), default=None)
        found = slope_text(power_law(mine, "steps", "squared_gradient"))
        rows.append([label(method), *means, found, number(folding, 3)])
    return markdown(("scheme", *(f"L = {size}" for size in sizes), "slope (95 %)", "folded, at most"), rows)


def reach(records: list[Record]) -> str:
    """Return the methods for one f, by base: distances from the truth with and without normaliser, cost."""
    rows = []
    for base in dict.fromkeys(record["cell"]["base"] for record in records):
        for method in dict.fromkeys(record["cell"]["method"] for record in chosen(records, base=base)):
            mine = good(records, base=base, method=method)
            rows.append(
                [
                    base,
                    method,
                    count(chosen(records, base=base, method=method)),
                    _excess(mine),
                    mean(mine, "fisher_divergence", 1),
                    mean(mine, "effective_draws", 0),
                    mean(mine, "kl_dual", 2),
                    mean(mine, "mmd", 2, factor=1e3),
                    mean(mine, "c2st", 2),
                    mean(mine, "processor_seconds", 0),
                    ", ".join(dict.fromkeys(record["values"]["status"] for record in mine)) or NOTHING,
                ]
            )
    names = (
        "base",
        "method",
        "draws",
        "NLL − truth",
        "Fisher divergence",
        "effective of 32,768 importance draws",
    )
    return markdown((*names, "KL(q ‖ p0) by ν", "MMD² ×10³", "C2ST", "processor s", "status"), rows)


def arrival(records: list[Record]) -> str:
    """Return when the saddle point was first within the tolerance, and the cost of the whole run."""
    rows = []
    for record in good(records):
        values = record["values"]
        numbers = [number(values.get("step"), 0), number(values.get("arrival_processor_seconds"), 0)]
        rows.append(
            [
                record["cell"]["dataset"],
                str(record["cell"]["seed"]),
                f"{values['level']}",
                *numbers,
                number(values["processor_seconds"], 0),
                f"{values['last_gap']:+.3f}",
            ]
        )
    names = (
        "data",
        "draw",
        "nats above exact",
        "updates of f until then",
        "processor s until then",
        "processor s, whole fit",
    )
    return markdown((*names, "NLL − exact in the end"), rows)


def _excess(records: list[Record]) -> str:
    """Return the NLL above the truth's, if the normaliser of every record is known well enough."""
    found = [record["values"] for record in records]
    if not found or not all(normalised(values) for values in found):
        return NOTHING
    excess = float(np.mean([values["nll"] - values["truth_nll"] for values in found]))
    return f"{excess:+.2f} ± {float(np.mean([values['nll_error'] for values in found])):.2f}"


def normalised(values: dict) -> bool:
    """Return whether repetitions agree on the normaliser and draws of the truth show no missed mass."""
    error = values.get("log_partition_error", np.inf)
    return error <= MOST_ERROR and values["log_partition_by_truth"] <= values["log_partition"] + MOST_ERROR
