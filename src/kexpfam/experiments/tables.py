"""Records in, Markdown out, and nothing else looked at: every published number passes through here."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.stats

from kexpfam.experiments.records import Record, chosen, good

with (Path(__file__).parent / "paper.toml").open("rb") as stream:
    PAPER = tomllib.load(stream)

NOTHING = "–"


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
    names += ("fit s, worst", "MB", "s per 5,000 draws", "paper's s")
    groups = sorted({tuple(record["cell"][name] for name in ("dim", "dataset", "method")) for record in records})
    return markdown(names, [_synthetic_row(records, *group) for group in groups])


def _synthetic_row(records: list[Record], dim: int, dataset: str, method: str) -> list[str]:
    same_set = chosen(records, dim=dim, dataset=dataset)
    mine = good(same_set, method=method)
    excess = [record["values"]["nll"] - record["values"]["truth_nll"] for record in mine]
    printed = lambda name: PAPER["table1"][name].get(dataset, {}).get(method) if dim == 2 else None
    return [
        dataset,
        str(dim),
        method,
        count(chosen(same_set, method=method)),
        mean_and_error(mine, "nll", 3),
        f"{np.mean(excess):+.3f}" if excess else NOTHING,
        _worst_gap(same_set, method),
        mean_and_error(mine, "mmd", 2, factor=1e3),
        number(printed("mmd"), 2),
        mean(mine, "mmd_refined", 2, factor=1e3),
        most(mine, "seconds"),
        most(mine, "megabytes"),
        mean(mine, "sampling_seconds", 3),
        number(printed("sampling_seconds"), 2),
    ]


def table2(records: list[Record]) -> str:
    """Return the table of the benchmark sets: ours, the baselines', and the paper's figures beside each."""
    names: tuple[str, ...] = (
        "data",
        "halves",
        "exact",
        "DDE",
        "DDE's halves",
        "DDE − exact, worst",
        "DDE sampler's PIT, p",
        "paper's DDE",
        "delta",
        "its protocol",
    )
    names += tuple(name for label in ("KCEF", "LSCDE", "ε-KDE") for name in (label, "paper's"))
    names += ("bare ε-KDE",)
    return markdown(names, [_benchmark_row(records, name) for name in PAPER["table2"] if chosen(records, dataset=name)])


def _benchmark_row(records: list[Record], dataset: str) -> list[str]:
    of = lambda method: good(records, dataset=dataset, method=method)
    exact, printed = of("exact"), PAPER["table2"][dataset]
    ties = "*" if any("TiesWarning" in record["warnings"] for record in exact) else ""
    cells = [
        dataset + ties,
        count(chosen(records, dataset=dataset, method="exact")),
        mean_and_spread(exact, "nll"),
        mean_and_spread(of("dde"), "nll"),
        count(chosen(records, dataset=dataset, method="dde")),
        _worst_gap(chosen(records, dataset=dataset), "dde"),
        ", ".join(f"{record['values']['sampler_ks_p_value']:.3f}" for record in of("dde")) or NOTHING,
        spread(printed["dde"]),
        _difference(exact, printed["dde"][0]),
        mean_and_spread(good(records, dataset=dataset, measure="released_protocol"), "nll"),
    ]
    for method in ("kcef", "lscde", "epsilon-kde"):
        cells += [mean_and_spread(of(method), "nll") + failures(chosen(records, dataset=dataset, method=method))]
        cells += [spread(printed.get(method))]
    return [*cells, mean_and_spread(good(records, dataset=dataset, measure="bare_neighbours"), "nll")]


def _difference(records: list[Record], printed: float) -> str:
    found = _mean(records, "nll")
    return NOTHING if found is None else f"{found - printed:+.2f}"


def larger(records: list[Record]) -> str:
    """Return the table of the larger set: likelihood and time of each competitor."""
    rows = []
    for method in dict.fromkeys(record["cell"]["method"] for record in records):
        mine = good(records, method=method)
        seen = chosen(records, method=method)
        rows.append([method, count(seen), mean(mine, "rows", 0), mean_and_error(mine, "nll", 3), mean(mine, "seconds", 0)])
    return markdown(("NOxEmissions", "halves", "training rows", "NLL", "fit s"), rows)


def headline1(records: list[Record]) -> str:
    """Return the synthetic sets in one row each: likelihood of every method, the sampler's distance, and time."""
    methods = ("dde", "exact", "score matching", "kde", "mixture", "spline flow")
    rows = []
    for dim, dataset in sorted({(record["cell"]["dim"], record["cell"]["dataset"]) for record in records}):
        of = lambda method, dim=dim, dataset=dataset: good(records, dim=dim, dataset=dataset, method=method)
        printed = PAPER["table1"]["mmd"][dataset]["dde"] if dim == 2 else None
        row = [dataset, str(dim), mean(of("dde"), "truth_nll", 2), *(mean(of(method), "nll", 2) for method in methods)]
        row += [mean(of("dde"), "mmd", 2, factor=1e3), number(printed, 2), mean(of("dde"), "seconds", 0)]
        rows.append([*row, mean(of("dde"), "sampling_seconds", 0, factor=1e3)])
    names = ("data", "dim", "truth", "**DDE**", "exact", "score matching", "KDE", "mixture", "spline flow", "MMD² ×10³")
    return markdown((*names, "paper's", "fit s", "ms per 5,000 draws"), rows)


def headline2(records: list[Record]) -> str:
    """Return the benchmark sets in one row each: ours beside the figures that the paper printed."""
    rows = []
    for dataset, printed in PAPER["table2"].items():
        exact = good(records, dataset=dataset, method="exact")
        if exact:
            ties = "*" if any("TiesWarning" in record["warnings"] for record in exact) else ""
            others = [spread(printed.get(method)) for method in ("dde", "kcef", "epsilon-kde", "lscde")]
            rows.append([dataset + ties, mean_and_spread(exact, "nll"), *others])
    return markdown(("data", "**ours**", "paper's DDE", "KCEF", "ε-KDE", "LSCDE"), rows)


def algorithms(records: list[Record]) -> str:
    """Return the table of the solvers on the same draws: likelihood beside the exact one's, time and memory."""
    rows = []
    for method in dict.fromkeys(record["cell"]["method"] for record in records):
        mine = good(records, method=method)
        rows.append(
            [
                method,
                count(chosen(records, method=method)),
                mean_and_error(mine, "nll", 3),
                _worst_gap(records, method),
                _fact(mine, "polish_gain"),
                mean(mine, "sampler_kl", 3),
                mean_and_error(mine, "mmd", 2, factor=1e3),
                mean(mine, "seconds", 0),
                most(mine, "megabytes"),
            ]
        )
    names = ("solver", "draws", "NLL", "NLL − exact, worst", "polish", "KL(sampler ‖ density)", "MMD² ×10³", "fit s", "MB")
    return markdown(names, rows)


def headline_of_solvers(records: list[Record]) -> str:
    """Return what decides between solvers: how near each comes to the optimum, how good its sampler is, and its price."""
    rows = []
    for method in dict.fromkeys(record["cell"]["method"] for record in records):
        mine = good(records, method=method)
        price = [mean(mine, "sampler_kl", 3), mean(mine, "seconds", 0), most(mine, "megabytes")]
        rows.append([method, _worst_gap(records, method), _fact(mine, "polish_gain"), *price])
    return markdown(("solver", "NLL − exact, worst", "gain of the polish", "KL(sampler ‖ density)", "fit s", "MB"), rows)


def gaps_to_exact(records: list[Record], method: str) -> list[float]:
    """Return how far a solver's NLL is above the exact solution's, on each draw of each set that both have."""
    draw = lambda record: (record["cell"]["dataset"], record["cell"]["seed"])
    exact = {draw(record): record["values"]["nll"] for record in good(records, method="exact")}
    return [record["values"]["nll"] - exact[draw(record)] for record in good(records, method=method) if draw(record) in exact]


def _worst_gap(records: list[Record], method: str) -> str:
    """Return the largest excess of a solver's NLL over the exact solution's on the same draw."""
    gaps = gaps_to_exact(records, method)
    return f"{max(gaps):+.3f}" if gaps and method != "exact" else NOTHING


def _fact(records: list[Record], name: str) -> str:
    """Return the mean of a fact that only some solvers have."""
    values = [record["values"]["facts"][name] for record in records if name in record["values"].get("facts", {})]
    return f"{np.mean(values):.3f}" if values else NOTHING


def duals(records: list[Record]) -> str:
    """Return the table of dual families: how far each stays from the density of its f, and what f it ends at."""
    rows = []
    for family in dict.fromkeys(record["cell"]["method"] for record in records):
        mine, seen = good(records, method=family), chosen(records, method=family)
        values = [mean(mine, name, digits) for name, digits in (("sampler_kl", 3), ("nll", 3), ("seconds", 0))]
        rows.append([family, count(seen), *values])
    return markdown(("family of q", "draws", "KL(q ‖ p_f)", "NLL of f", "fit s"), rows)


def cost(records: list[Record]) -> str:
    """Return seconds and megabytes of each method at each size."""
    methods = list(dict.fromkeys(record["cell"]["method"] for record in records))
    sizes = sorted({(record["cell"]["dim"], record["cell"]["rows"]) for record in records})
    rows = []
    for dim, size in sizes:
        seen = [chosen(records, dim=dim, rows=size, method=method) for method in methods]
        rows.append([str(dim), str(size), *(_cost_cell(cell) for cell in seen)])
    return markdown(("dim", "rows", *(f"{method}: s / MB" for method in methods)), rows)


def _cost_cell(records: list[Record]) -> str:
    fine = [record for record in records if record["status"] == "ok"]
    if not fine:
        return "failed" if records else NOTHING
    return f"{mean(fine, 'seconds', 1)} / {mean(fine, 'megabytes', 0)}"


def rate(records: list[Record]) -> str:
    """Return the mean divergence at each number of rows, and the slope of its logarithm with a 95 % interval."""
    sizes = sorted({record["cell"]["rows"] for record in records})
    rows = []
    for method in dict.fromkeys(record["cell"]["method"] for record in records):
        means = [mean_and_error(good(records, method=method, rows=size), "kl", 5) for size in sizes]
        rows.append([method, *means, slope_text(slope(good(records, method=method)))])
    return markdown(("estimator", *(f"n = {size:,}" for size in sizes), "slope (95 %)"), rows)


def slope(records: list[Record]) -> tuple[float, float] | None:
    """Return the slope of log divergence against log rows and the half width of its 95 % interval; None for one size."""
    rows = np.log([record["cell"]["rows"] for record in records])
    if len(set(rows)) < 2 or len(rows) < 3:
        return None
    fit = scipy.stats.linregress(rows, np.log([max(record["values"]["kl"], 1e-12) for record in records]))
    return float(fit.slope), float(scipy.stats.t.ppf(0.975, len(rows) - 2) * fit.stderr)


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
    """Return the mean of a value over records with its standard error, where there are two records at least."""
    values = _values(records, name, factor)
    error = f" ± {np.std(values, ddof=1) / np.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return mean(records, name, digits, factor=factor) + error


def mean_and_spread(records: list[Record], name: str) -> str:
    """Return the mean of a value over records with its standard deviation, as the paper prints it; one record has none."""
    values = _values(records, name, 1.0)
    return spread((float(np.mean(values)), float(np.std(values)))) if len(values) > 1 else mean(records, name, 2)


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
