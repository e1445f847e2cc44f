"""Tables about the saddle point itself: other spaces of f, the convergence theorem, and where no normaliser is in reach."""

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
    number,
    power_law,
    slope_text,
)

__all__ = ["MOST_ERROR", "reach", "spaces", "stationarity"]

# A likelihood is shown if its normaliser is known to so many nats, by repetitions and by draws of the truth.
MOST_ERROR = 0.3


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
    names = ("f in", "draws", "NLL, exact", "NLL, DDE alone", "DDE − exact, worst", "MMD² ×10³, exact", "MMD² ×10³, DDE alone")
    return markdown((*names, "processor s, DDE alone"), rows)


def stationarity(records: list[Record]) -> str:
    """Return the mean squared gradient for each number of steps, and its slope in logarithms beside the last iterate's."""
    sizes = sorted({record["cell"]["steps"] for record in records})
    rows = []
    for method in dict.fromkeys(record["cell"]["method"] for record in records):
        mine = good(records, method=method)
        means = [mean_and_error(good(mine, steps=size), "squared_gradient", 4) for size in sizes]
        slopes = [slope_text(power_law(mine, "steps", name)) for name in ("squared_gradient", "end")]
        folding = max((record["values"]["folding_share"] for record in mine), default=None)
        rows.append([label(method), mean(mine, "start", 4), *means, *slopes, number(folding, 3)])
    names = (
        "scheme",
        "at the start",
        *(f"L = {size}" for size in sizes),
        "slope (95 %)",
        "slope, last iterate",
        "folded, at most",
    )
    return markdown(names, rows)


def reach(records: list[Record]) -> str:
    """Return the roads to the same f, base by base: distance from the truth with and without the normaliser, and the price."""
    rows = []
    for base in dict.fromkeys(record["cell"]["base"] for record in records):
        for method in dict.fromkeys(record["cell"]["method"] for record in chosen(records, base=base)):
            mine = good(records, base=base, method=method)
            rows.append(
                [
                    base,
                    method,
                    _excess(mine),
                    mean(mine, "fisher_divergence", 1),
                    mean(mine, "effective_draws", 0),
                    mean(mine, "mmd", 2, factor=1e3),
                    mean(mine, "c2st", 2),
                    mean(mine, "processor_seconds", 0),
                    ", ".join(dict.fromkeys(record["values"]["status"] for record in mine)) or NOTHING,
                ]
            )
    names = ("base", "road", "NLL − truth", "Fisher divergence", "effective of 32,768 importance draws", "MMD² ×10³", "C2ST")
    return markdown((*names, "processor s", "status"), rows)


def _excess(records: list[Record]) -> str:
    """Return the NLL above the truth's, if the normaliser of every record is known well enough."""
    found = [record["values"] for record in records]
    if not found or not all(_normalised(values) for values in found):
        return NOTHING
    excess = float(np.mean([values["nll"] - values["truth_nll"] for values in found]))
    return f"{excess:+.2f} ± {float(np.mean([values['nll_error'] for values in found])):.2f}"


def _normalised(values: dict) -> bool:
    """Return whether repetitions agree on the normaliser, and draws of the truth do not speak of mass that they have missed."""
    error = values.get("log_partition_error", np.inf)
    return error <= MOST_ERROR and values["log_partition_by_truth"] <= values["log_partition"] + MOST_ERROR
