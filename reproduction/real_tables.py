"""The tables of the real data: records and printed figures in, Markdown out."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reproduction.methods import CONDITIONALS, DENSITIES
from reproduction.records import Record, chosen, good
from reproduction.tables import (
    NOTHING,
    count,
    failures,
    label,
    legend,
    markdown,
    mean,
    mean_and_error,
    most,
    number,
)

__all__ = [
    "PUBLISHED",
    "ablation",
    "by_dataset",
    "details",
    "joint",
    "labelled",
    "lowest_in_bold",
    "posteriors",
    "star",
    "uci",
    "unseen",
]

with (Path(__file__).parent / "published.toml").open("rb") as stream:
    PUBLISHED = tomllib.load(stream)

REGRESSORS = ("auto", "ngboost", "quantile forest", "conditional kde")
PARTS = ("auto", "plain inputs", "encoded inputs", "inputs and trees", "trees alone")
LABELLED = ("auto", "ngboost", "quantile forest", "treeffuser")
DENSITY_MODELS = ("auto", "sklearn mixture", "spline flow", "vine")
# Spikes make data as likely as one likes where a target has this share of distinct values or less, or where a
# value of a column has this share of its rows or more.
FEW_VALUES, MANY_TIES = 0.05, 0.2
# A PIT that is less probable than this, if it were uniform, is not.
LEAST_P_VALUE = 0.01


def uci(records: list[Record]) -> str:
    """Return the table of NLL (ours, peers, printed) and the table of calibration and cost."""
    names = list(next(iter(PUBLISHED["regression"].values())))
    rows, costs = [], []
    for dataset, here in by_dataset(records):
        printed = [PUBLISHED["regression"].get(dataset, {}).get(name) for name in names]
        mark, texts = (
            star(here),
            [*_likelihoods(here, REGRESSORS, 2), *(number(value, 2) for value in printed)],
        )
        if not mark:
            texts = lowest_in_bold(texts, [*_mean_nlls(here, REGRESSORS), *printed])
        rows.append([dataset + mark, _size(here), count(chosen(here, method="auto")), *texts])
        mine = [good(here, method=method) for method in REGRESSORS]
        costs.append([dataset + mark, *(f"{_calibrated(each)}; {_time_and_memory(each)}" for each in mine)])
    header = (
        "set",
        "rows × inputs",
        "splits, default",
        *_names(REGRESSORS),
        *(f"{name}, printed" for name in names),
    )
    below = markdown(("PIT; fit s / MB", *_names(REGRESSORS)), costs)
    return f"{markdown(header, rows)}\n\n{below}\n\n{legend(REGRESSORS, CONDITIONALS)}"


def unseen(records: list[Record]) -> str:
    """Return NLL, calibration and cost of the default on splits that no choice has seen."""
    rows = []
    for dataset, here in by_dataset(records):
        mine, printed = good(here, method="auto"), PUBLISHED["pretrained"].get(dataset)
        texts = [*_likelihoods(here, ["auto"], 2), number(printed, 2)]
        if not star(here):
            texts = lowest_in_bold(texts, [*_mean_nlls(here, ["auto"]), printed])
        name, splits = dataset + star(here), count(chosen(here, method="auto"))
        rows.append([name, _size(here), splits, *texts, _calibrated(mine), _time_and_memory(mine)])
    header = ("set", "rows × inputs", "splits", *_names(["auto"]), "TabPFN v2, printed", "PIT", "fit s / MB")
    return markdown(header, rows)


def labelled(records: list[Record]) -> str:
    """Return NLL, CRPS, calibration and cost of ours and of the peers on tables with labels."""
    rows = []
    for dataset, here in by_dataset(records):
        nlls, mine = _mean_nlls(here, LABELLED), [good(here, method=method) for method in LABELLED]
        printed = PUBLISHED["pretrained"].get(dataset)
        texts = [*_likelihoods(here, LABELLED, 3), number(printed, 2)]
        each = [f"{_crps(one)}; {mean(one, 'coverage_90', 3)}" for one in mine]
        rows += [
            [dataset, _size(here), "NLL", *lowest_in_bold(texts, [*nlls, printed])],
            ["", "", "CRPS; inside 90 %", *each, NOTHING],
            ["", "", "fit s / MB", *map(_time_and_memory, mine), NOTHING],
        ]
    return markdown(("set", "rows × inputs", "", *_names(LABELLED), "TabPFN v2, printed"), rows)


def ablation(records: list[Record]) -> str:
    """Return NLL and cost of the default and of each of its parts alone."""
    rows = []
    for dataset, here in by_dataset(records):
        texts = lowest_in_bold(_likelihoods(here, PARTS, 3), _mean_nlls(here, PARTS))
        rows.append([dataset, _size(here), count(chosen(here, method="auto")), *texts])
    header = ("set", "rows × inputs", "splits", *_names(PARTS))
    return f"{markdown(header, rows)}\n\n{legend(PARTS, CONDITIONALS)}"


def joint(records: list[Record]) -> str:
    """Return the table of NLL of ours and of the peers, and the table of time, memory and sampling speed."""
    rows, draws, costs = [], [], []
    for dataset, here in by_dataset(records):
        mark, texts = star(here), _likelihoods(here, DENSITY_MODELS, 3)
        if not mark:
            texts = lowest_in_bold(texts, _mean_nlls(here, DENSITY_MODELS))
        mine = [good(here, method=method) for method in DENSITY_MODELS]
        verdicts = dict.fromkeys(record["values"]["verdict"] for record in mine[0])
        own = [", ".join(verdicts) or NOTHING, _shares(mine[0])]
        rows.append([dataset + mark, _size(here), mean(good(here), "truth_nll", 3), *texts, *own])
        draws.append([dataset, *map(_resemblance, mine)])
        costs.append([dataset + mark, *(f"{_time_and_memory(each)}; {_milliseconds(each)}" for each in mine)])
    header = ("set", "rows × columns", "truth", *_names(DENSITY_MODELS), "verdict on the default", "made of")
    names = _names(DENSITY_MODELS)
    alike = markdown(("C2ST by trees / network; KS; correlations", *names), draws)
    below = markdown(("fit s / MB; ms per 5,000 draws", *names), costs)
    parts = markdown(header, rows), alike, below, _printed_joint(), legend(DENSITY_MODELS, DENSITIES)
    return "\n\n".join(parts)


def posteriors(records: list[Record]) -> str:
    """Return C2ST of our draws beside the printed one of neural posterior estimation, and time and memory."""
    rows = []
    for task, size in sorted({(record["cell"]["dataset"], record["cell"]["rows"]) for record in records}):
        seen = chosen(records, dataset=task, rows=size, method="auto")
        mine, printed = good(seen), PUBLISHED["posterior"].get(task, {}).get(str(size))
        ours = float(np.mean([record["values"]["c2st"] for record in mine])) if mine else None
        worst = max((max(record["values"]["c2st_each"]) for record in mine), default=None)
        texts = lowest_in_bold([number(ours, 3) + failures(seen), number(printed, 3)], [ours, printed])
        outside = mean(mine, "outside", 1, factor=100.0)
        judged = ", ".join(dict.fromkeys(str(record["cell"]["observations"]) for record in seen)) or NOTHING
        rows.append(
            [
                task,
                f"{size:,}",
                judged,
                *texts,
                number(worst, 3),
                outside,
                _time_and_memory(mine),
                _milliseconds(mine),
            ]
        )
    names: tuple[str, ...] = (
        "task",
        "simulations",
        "observations",
        *_names(["auto"]),
        "NPE, printed",
        "worst observation",
    )
    names += ("% of draws off the support",)
    table = markdown((*names, "fit s / MB", "ms per 5,000 draws"), rows)
    return (
        f"{table}\n\n{legend(['auto'], CONDITIONALS)} The support of a uniform prior is passed as `bounds=`."
    )


def _crps(records: list[Record]) -> str:
    """Return the mean CRPS with four digits, whatever the units of the target."""
    if not records:
        return NOTHING
    value = float(np.mean([record["values"]["crps"] for record in records]))
    return f"{value:,.{max(0, 3 - int(np.floor(np.log10(value))))}f}"


def _resemblance(records: list[Record]) -> str:
    """Return the distances between draws and test rows."""
    apart = " / ".join(mean(records, f"c2st_{name}", 2) for name in ("boosted", "network"))
    return f"{apart}; {mean(records, 'ks_distance', 3)}; {mean(records, 'correlation_distance', 3)}"


def _shares(records: list[Record]) -> str:
    """Return the weights of the candidates in per cent, the largest first; means over records."""
    each = [record["values"]["weights"] for record in records if "weights" in record["values"]]
    means = {
        name: float(np.mean([weights.get(name, 0.0) for weights in each]))
        for weights in each
        for name in weights
    }
    found = sorted(means.items(), key=lambda share: -share[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in found if share > 0.0) or NOTHING


def details(records: list[Record]) -> str:
    """Return everything that was measured of each method on each set, one row each."""
    rows = []
    for dataset, here in by_dataset(records):
        for method in dict.fromkeys(record["cell"]["method"] for record in here):
            seen, mine = chosen(here, method=method), good(here, method=method)
            packages = dict.fromkeys(record["values"].get("package", NOTHING) for record in mine)
            row = [dataset, label(method), count(seen), _likelihood(mine, 3)]
            row += [
                _calibrated(mine),
                mean(mine, "coverage_90", 2),
                mean(mine, "seconds", 1),
                most(mine, "seconds"),
            ]
            rows.append([*row, most(mine, "megabytes"), _milliseconds(mine), ", ".join(packages) or NOTHING])
    names = (
        "set",
        "method",
        "runs",
        "NLL",
        "PIT",
        "inside 90 %",
        "fit s",
        "worst",
        "MB",
        "ms per 5,000 draws",
        "package",
    )
    return markdown(names, rows)


def lowest_in_bold(texts: Sequence[str], values: Sequence[float | None]) -> list[str]:
    """Return the texts with that of the lowest value in bold if there are at least two."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return list(texts)
    return [f"**{text}**" if value == min(known) else text for text, value in zip(texts, values, strict=True)]


def by_dataset(records: list[Record]) -> list[tuple[str, list[Record]]]:
    return [
        (name, chosen(records, dataset=name))
        for name in sorted({record["cell"]["dataset"] for record in records})
    ]


def _names(methods: Sequence[str]) -> list[str]:
    return [f"**{label(method)}**" if method == "auto" else label(method) for method in methods]


def _likelihoods(here: list[Record], methods: Sequence[str], digits: int) -> list[str]:
    """Return the mean NLL of each method with its standard error over runs, failures in sight."""
    return [_likelihood(good(here, method=m), digits) + failures(chosen(here, method=m)) for m in methods]


def _likelihood(mine: list[Record], digits: int) -> str:
    """Return the mean NLL; where rows have a density of 0, how many, and the NLL of the others."""
    text, impossible = mean_and_error(mine, "nll", digits), _impossible(mine)
    return f"∞ (rows of density 0: {impossible}; {text} without)" if impossible else text


def _impossible(mine: list[Record]) -> int:
    return sum(record["values"]["impossible_rows"] for record in mine)


def _mean_nlls(here: list[Record], methods: Sequence[str]) -> list[float | None]:
    each = [good(here, method=method) for method in methods]
    values = [
        [np.inf if _impossible([record]) else record["values"]["nll"] for record in mine] for mine in each
    ]
    return [float(np.mean(found)) if found else None for found in values]


def _size(here: list[Record]) -> str:
    """Return rows and columns of the training part; of a regression, without the target."""
    for record in good(here):
        is_regression = record["cell"]["measure"] != "joint"
        return f"{record['values']['training_rows']:,} × {record['values']['columns'] - is_regression}"
    return NOTHING


def star(here: list[Record]) -> str:
    """Return a star if there are so many ties that the likelihood has no bound."""
    few = lambda values: values.get("distinct_targets", np.inf) <= FEW_VALUES * values["training_rows"]
    tied = lambda values: values.get("ties", 0.0) >= MANY_TIES
    return "*" if any(few(record["values"]) or tied(record["values"]) for record in good(here)) else ""


def _calibrated(records: list[Record]) -> str:
    """Return on how many runs the PIT may be uniform."""
    p_values = [record["values"]["ks_p_value"] for record in records if "ks_p_value" in record["values"]]
    return f"{sum(p >= LEAST_P_VALUE for p in p_values)} of {len(p_values)}" if p_values else NOTHING


def _time_and_memory(records: list[Record]) -> str:
    return f"{mean(records, 'seconds', 1)} / {most(records, 'megabytes')}"


def _milliseconds(records: list[Record]) -> str:
    return mean(records, "sampling_seconds", 0, factor=1e3)


def _printed_joint() -> str:
    """Return the sentence on figures of another protocol."""
    printed = ", ".join(f"{name} {value:.2f}" for name, value in PUBLISHED["joint"]["redwine"].items())
    return f"Printed for red wine, over ten folds of the whole set: {printed}."
