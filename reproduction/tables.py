"""Markdown tables as functions of the records; every published number is computed here.

A cell without records is a dash: what was not measured is not filled in.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy.stats

from reproduction.methods import CONDITIONALS, DENSITIES, LABELS, Method, parted
from reproduction.records import Record, chosen, good, unseen_halves

__all__ = [
    "NOTHING",
    "PAPER",
    "algorithms",
    "cost",
    "count",
    "duals",
    "failures",
    "gaps_to_exact",
    "headline1",
    "headline2",
    "headline_of_solvers",
    "label",
    "larger",
    "legend",
    "markdown",
    "mean",
    "mean_and_error",
    "moons",
    "most",
    "number",
    "power_law",
    "rate",
    "slope",
    "slope_text",
    "table1",
    "table2",
]

with (Path(__file__).parent / "paper.toml").open("rb") as stream:
    PAPER = tomllib.load(stream)

NOTHING = "–"
# Shown whether they have records or not: the default, and the paper's algorithm on its own.
OURS = ("auto", "dde")
# The competitors of Table 2, in the order of the paper's columns.
RIVALS = ("kcef", "epsilon-kde", "lscde")


def label(method: str) -> str:
    """Return the displayed name of a method."""
    return LABELS.get(method, method)


def legend(methods: Iterable[str], registry: Mapping[str, Method]) -> str:
    """Return which call is behind each name of a table."""
    return "; ".join(f"*{label(method)}*: `{registry[method]}`" for method in methods) + "."


def table1(records: list[Record]) -> str:
    """Return the table of the synthetic sets: one row per set and method, means over training draws."""
    names: tuple[str, ...] = (
        "data",
        "dim",
        "method",
        "draws",
        "NLL",
        "NLL − truth",
        "NLL − exact, worst",
        "MMD² ×10³",
        "paper's",
        "refined",
    )
    names += ("KL(sampler ‖ density)", "fit s, worst", "MB", "s per 5,000 draws", "paper's s")
    place = list(DENSITIES).index
    seen = {tuple(record["cell"][name] for name in ("dim", "dataset", "method")) for record in records}
    seen |= {(*group[:2], method) for group in seen for method in OURS}
    groups = sorted(seen, key=lambda group: (*group[:2], place(group[2])))
    present = [method for method in DENSITIES if any(group[2] == method for group in groups)]
    rows = [_synthetic_row(records, *group) for group in groups]
    return f"{markdown(names, rows)}\n\n{legend(present, DENSITIES)}"


def _synthetic_row(records: list[Record], dim: int, dataset: str, method: str) -> list[str]:
    same_set = chosen(records, dim=dim, dataset=dataset)
    mine = good(same_set, method=method)
    excess = [record["values"]["nll"] - record["values"]["truth_nll"] for record in mine]
    printed = lambda name: PAPER["table1"][name].get(dataset, {}).get(method) if dim == 2 else None
    return [
        dataset,
        str(dim),
        label(method),
        count(chosen(same_set, method=method)),
        mean_and_error(mine, "nll", 3),
        f"{np.mean(excess):+.3f}" if excess else NOTHING,
        _worst_gap(same_set, method),
        mean_and_error(mine, "mmd", 2, factor=1e3),
        number(printed("mmd"), 2),
        mean(mine, "mmd_refined", 2, factor=1e3),
        divergence(mine),
        most(mine, "seconds"),
        most(mine, "megabytes"),
        mean(mine, "sampling_seconds", 3),
        number(printed("sampling_seconds"), 2),
    ]


def headline1(records: list[Record]) -> str:
    """Return one row per synthetic set: likelihood of every method, distances of the samplers, and time."""
    methods = (*OURS, "exact", "score matching", "kde", "mixture", "spline flow")
    rows = []
    for dim, dataset in sorted({(record["cell"]["dim"], record["cell"]["dataset"]) for record in records}):
        same_set = good(records, dim=dim, dataset=dataset)
        truth = {record["cell"]["seed"]: record["values"]["truth_nll"] for record in same_set}
        each = lambda name, digits, factor=1.0, rows=same_set: [
            mean(good(rows, method=method), name, digits, factor=factor) for method in OURS
        ]
        printed = PAPER["table1"]["mmd"][dataset]["dde"] if dim == 2 else None
        row = [dataset, str(dim), number(float(np.mean(list(truth.values()))) if truth else None, 2)]
        row += [mean(good(same_set, method=method), "nll", 2) for method in methods]
        row += [
            *each("mmd", 2, 1e3),
            number(printed, 2),
            *each("seconds", 0),
            *each("sampling_seconds", 0, 1e3),
        ]
        rows.append(row)
    names = ("data", "dim", "truth", *(f"**{label(m)}**" if m == "auto" else label(m) for m in methods))
    names += ("MMD², auto", "MMD², DDE", "MMD², paper's", "fit s, auto", "fit s, DDE", "ms, auto", "ms, DDE")
    return f"{markdown(names, rows)}\n\n{legend(methods, DENSITIES)}"


def moons(records: list[Record]) -> str:
    """Return the distances to the paper's test rows by training rows and method, beside the printed one."""
    printed, rows = PAPER["table1"]["mmd"]["two-moons"]["dde"], []
    for cell in dict.fromkeys((r["cell"]["train"], r["cell"]["method"]) for r in records):
        found = 1e3 * np.array([r["values"]["mmd"] for r in good(records, train=cell[0], method=cell[1])])
        spread_of = f"{found.mean():.2f} ± {found.std(ddof=1) / np.sqrt(len(found)):.2f}"
        ends = f"{found.min():.2f} to {found.max():.2f}"
        below = f"{np.sum(found <= printed)} of {len(found)}"
        rows.append([cell[0], label(cell[1]), str(len(found)), spread_of, ends, below])
    own = 1e3 * np.mean([record["values"]["mmd_error"] for record in good(records, method="truth")])
    names = ("training rows", "draws of", "runs", "MMD² ×10³", "range", f"at most the printed {printed}")
    note = f"The standard error of the U-statistic itself, for draws of the truth, is {own:.2f}."
    return f"{markdown(names, rows)}\n\n{note}"


def table2(records: list[Record]) -> str:
    """Return the table of the benchmark sets: ours, the competitors re-run, and the printed figures."""
    names: tuple[str, ...] = (
        "data",
        "halves",
        label("auto"),
        "halves seen before",
        label("dde"),
        "DDE's halves",
        "auto − exact, worst",
        "DDE − exact, worst",
    )
    names += (
        "PIT of DDE's sampler, p",
        "paper's DDE",
        "auto − paper's",
        "its protocol",
        *_rival_names(),
        "bare ε-KDE",
    )
    rows = [_benchmark_row(records, name) for name in PAPER["table2"] if chosen(records, dataset=name)]
    return f"{markdown(names, rows)}\n\n{legend((*OURS, 'exact', *RIVALS), CONDITIONALS)}"


def _benchmark_row(records: list[Record], dataset: str) -> list[str]:
    both, printed = chosen(records, dataset=dataset), PAPER["table2"][dataset]
    here = unseen_halves(both)
    auto, dde = good(here, method="auto"), good(here, method="dde")
    return [
        _starred(here, dataset),
        count(chosen(here, method="auto")),
        mean_and_spread(auto, "nll"),
        mean_and_spread([record for record in good(both, method="auto") if record not in auto], "nll"),
        mean_and_spread(dde, "nll"),
        count(chosen(here, method="dde")),
        _worst_gap(here, "auto"),
        _worst_gap(here, "dde"),
        ", ".join(f"{record['values']['sampler_ks_p_value']:.3f}" for record in dde) or NOTHING,
        spread(printed["dde"]),
        _difference(auto, printed["dde"][0]),
        mean_and_spread(good(here, measure="released_protocol"), "nll"),
        *_rival_cells(here, printed),
        mean_and_spread(good(here, measure="bare_neighbours"), "nll"),
    ]


def headline2(records: list[Record]) -> str:
    """Return one row per benchmark set: ours, the competitors on the same halves, the printed figures."""
    rows = []
    for dataset, printed in PAPER["table2"].items():
        here = chosen(unseen_halves(records), dataset=dataset)
        if here:
            ours = [mean_and_spread(good(here, method=method), "nll") for method in OURS]
            rows.append(
                [_starred(here, dataset), *ours, spread(printed["dde"]), *_rival_cells(here, printed)]
            )
    names = ("data", f"**{label('auto')}**", label("dde"), "paper's DDE", *_rival_names())
    return f"{markdown(names, rows)}\n\n{legend((*OURS, *RIVALS), CONDITIONALS)}"


def _rival_names() -> tuple[str, ...]:
    return tuple(f"{label(method)}, {whose}" for method in RIVALS for whose in ("re-run", "printed"))


def _rival_cells(here: list[Record], printed: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the scores of each competitor on our halves, and the printed ones."""
    pairs = [
        (
            mean_and_spread(good(here, method=method), "nll") + failures(chosen(here, method=method)),
            spread(printed.get(method)),
        )
        for method in RIVALS
    ]
    return [cell for pair in pairs for cell in pair]


def _starred(here: list[Record], dataset: str) -> str:
    """Return the name of a set, with a star if its likelihood has no bound."""
    return dataset + ("*" if any("TiesWarning" in record["warnings"] for record in here) else "")


def _difference(records: list[Record], printed: float) -> str:
    found = _mean(records, "nll")
    return NOTHING if found is None else f"{found - printed:+.2f}"


def larger(records: list[Record]) -> str:
    """Return the table of the larger set: likelihood and time of each competitor."""
    rows = []
    for method in dict.fromkeys(("auto", *(record["cell"]["method"] for record in records))):
        mine = good(records, method=method)
        numbers = [mean(mine, "rows", 0), mean_and_error(mine, "nll", 3), mean(mine, "seconds", 0)]
        rows.append([label(method), count(chosen(records, method=method)), *numbers])
    return markdown(("NOxEmissions", "halves", "training rows", "NLL", "fit s"), rows)


def algorithms(records: list[Record]) -> str:
    """Return the table of the solvers on the same draws: each alone, and with the options that it has."""
    rows = []
    for name in _algorithms_in(records):
        alone, warm, polished = _variants(records, name)
        rows.append(
            [
                label(name),
                count(chosen(records, method=name)),
                mean_and_error(alone, "nll", 3),
                *_gaps(records, name),
                _fact(polished, "polish_gain"),
                divergence(alone),
                divergence(warm),
                mean_and_error(alone, "mmd", 2, factor=1e3),
                *(mean(variant, "seconds", 0) for variant in (alone, warm, polished)),
                most(alone, "megabytes"),
            ]
        )
    names: tuple[str, ...] = (
        "solver",
        "draws",
        "NLL",
        "NLL − exact, worst",
        "+ warm start",
        "+ polish",
        "gain of the polish",
    )
    names += ("KL(sampler ‖ density)", "+ warm start", "MMD² ×10³", "fit s", "+ warm start", "+ polish", "MB")
    return markdown(names, rows)


def headline_of_solvers(records: list[Record]) -> str:
    """Return the comparison of solvers: distance from the optimum, quality of the sampler, and cost."""
    rows = []
    for name in _algorithms_in(records):
        alone, *_ = _variants(records, name)
        price = [divergence(alone), mean(alone, "seconds", 0), most(alone, "megabytes")]
        rows.append([label(name), *_gaps(records, name), *price])
    names = (
        "solver",
        "NLL − exact, worst",
        "with a warm start",
        "with a polish",
        "KL(sampler ‖ density)",
        "fit s",
        "MB",
    )
    return markdown(names, rows)


def _algorithms_in(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(parted(record["cell"]["method"])[0] for record in records))


def _variants(records: list[Record], name: str) -> tuple[list[Record], list[Record], list[Record]]:
    """Return the records of an algorithm alone, from a warm start, and with a polish."""
    return (
        good(records, method=name),
        good(records, method=f"{name} + warm start"),
        good(records, method=f"{name} + polish"),
    )


def _gaps(records: list[Record], name: str) -> list[str]:
    return [_worst_gap(records, method) for method in (name, f"{name} + warm start", f"{name} + polish")]


def gaps_to_exact(records: list[Record], method: str) -> list[float]:
    """Return the excess NLL of a solver over the exact solution, for each draw of each set that both have."""
    draw = lambda record: (record["cell"]["dataset"], record["cell"]["seed"])
    exact = {draw(record): record["values"]["nll"] for record in good(records, method="exact")}
    return [
        record["values"]["nll"] - exact[draw(record)]
        for record in good(records, method=method)
        if draw(record) in exact
    ]


def _worst_gap(records: list[Record], method: str) -> str:
    """Return the largest excess of a solver's NLL over the exact solution's on the same draw."""
    gaps = gaps_to_exact(records, method)
    return f"{max(gaps):+.3f}" if gaps and method != "exact" else NOTHING


def _fact(records: list[Record], name: str) -> str:
    """Return the mean of a fact that only some solvers have."""
    values = [
        record["values"]["facts"][name] for record in records if name in record["values"].get("facts", {})
    ]
    return f"{np.mean(values):.3f}" if values else NOTHING


def divergence(records: list[Record]) -> str:
    """Return the mean of KL(sampler ‖ density), as a lower bound where a transport folds space."""
    found = _mean(records, "sampler_kl")
    if found is None:
        return NOTHING
    folds = any(record["values"].get("sampler_folds") for record in records)
    return f"{'≥ ' if folds else ''}{max(found, 0.0):.3f}"


def duals(records: list[Record]) -> str:
    """Return the table of dual families: divergence from the density of its f, and the quality of f."""
    rows = []
    for family in dict.fromkeys(record["cell"]["method"] for record in records):
        mine, seen = good(records, method=family), chosen(records, method=family)
        rows.append([family, count(seen), divergence(mine), mean(mine, "nll", 3), mean(mine, "seconds", 0)])
    return markdown(("family of q", "draws", "KL(q ‖ p_f)", "NLL of f", "fit s"), rows)


def cost(records: list[Record]) -> str:
    """Return seconds and megabytes of each method at each size."""
    methods = list(dict.fromkeys(record["cell"]["method"] for record in records))
    sizes = sorted({(record["cell"]["dim"], record["cell"]["rows"]) for record in records})
    rows = []
    for dim, size in sizes:
        seen = [chosen(records, dim=dim, rows=size, method=method) for method in methods]
        rows.append([str(dim), str(size), *(_cost_cell(cell) for cell in seen)])
    return markdown(("dim", "rows", *(f"{label(method)}: s / MB" for method in methods)), rows)


def _cost_cell(records: list[Record]) -> str:
    fine = [record for record in records if record["status"] == "ok"]
    if not fine:
        return "failed" if records else NOTHING
    return f"{mean(fine, 'seconds', 1)} / {mean(fine, 'megabytes', 0)}"


def rate(records: list[Record]) -> str:
    """Return the mean divergence per number of rows, and the slope of its logarithm with a 95 % interval."""
    sizes = sorted({record["cell"]["rows"] for record in records})
    rows = []
    for method in dict.fromkeys(record["cell"]["method"] for record in records):
        means = [mean_and_error(good(records, method=method, rows=size), "kl", 5) for size in sizes]
        rows.append([label(method), *means, slope_text(slope(good(records, method=method)))])
    return markdown(("estimator", *(f"n = {size:,}" for size in sizes), "slope (95 %)"), rows)


def slope(records: list[Record]) -> tuple[float, float] | None:
    """Return the exponent of the rows with which the divergence falls."""
    return power_law(records, "rows", "kl")


def power_law(records: list[Record], size: str, value: str) -> tuple[float, float] | None:
    """Return the growth exponent of a value and the half width of its 95 % interval; None for one size."""
    sizes = np.log([record["cell"][size] for record in records])
    if len(set(sizes)) < 2 or len(sizes) < 3:
        return None
    fit = scipy.stats.linregress(sizes, np.log([max(record["values"][value], 1e-12) for record in records]))
    return float(fit.slope), float(scipy.stats.t.ppf(0.975, len(sizes) - 2) * fit.stderr)


def slope_text(found: tuple[float, float] | None) -> str:
    """Return the slope with its interval."""
    return NOTHING if found is None else f"{found[0]:.2f} ± {found[1]:.2f}"


def markdown(names: Sequence[str], rows: list[list[str]]) -> str:
    """Return a table of Markdown."""
    if any(len(row) != len(names) for row in rows):
        raise ValueError(f"a row of the table does not have its {len(names)} columns.")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def count(records: list[Record]) -> str:
    """Return how many records there are, with failures in sight."""
    return str(sum(record["status"] == "ok" for record in records)) + failures(records)


def failures(records: list[Record]) -> str:
    """Return how many records failed, if any did."""
    failed = sum(record["status"] != "ok" for record in records)
    return f" ({failed} failed)" if failed else ""


def mean(records: list[Record], name: str, digits: int, *, factor: float = 1.0) -> str:
    """Return the mean of a value over records."""
    return number(_mean(records, name, factor=factor), digits)


def most(records: list[Record], name: str) -> str:
    """Return the largest of a value over records."""
    return number(max(_values(records, name, 1.0), default=None), 0)


def mean_and_error(records: list[Record], name: str, digits: int, *, factor: float = 1.0) -> str:
    """Return the mean of a value over records, with its standard error if there are at least two."""
    values = _values(records, name, factor)
    error = f" ± {np.std(values, ddof=1) / np.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return mean(records, name, digits, factor=factor) + error


def mean_and_spread(records: list[Record], name: str) -> str:
    """Return the mean of a value over records, with its standard deviation if there are at least two."""
    values = _values(records, name, 1.0)
    return (
        spread((float(np.mean(values)), float(np.std(values)))) if len(values) > 1 else mean(records, name, 2)
    )


def spread(pair: Sequence[float] | None) -> str:
    """Return a mean and a standard deviation."""
    return NOTHING if pair is None else f"{pair[0]:.2f} ± {pair[1]:.2f}"


def number(value: float | None, digits: int) -> str:
    """Return a number, or a dash for none."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def _mean(records: list[Record], name: str, *, factor: float = 1.0) -> float | None:
    values = _values(records, name, factor)
    return float(np.mean(values)) if values else None


def _values(records: list[Record], name: str, factor: float) -> list[float]:
    return [factor * record["values"][name] for record in records if record["values"].get(name) is not None]
