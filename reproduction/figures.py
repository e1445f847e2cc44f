"""Records in, figures out."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from numpy.typing import ArrayLike  # noqa: E402

from kexpfam.plot.canvas import DATA_COLOUR, MODEL_COLOUR
from reproduction.records import Record, chosen, good
from reproduction.saddle_tables import normalised
from reproduction.tables import label, slope, slope_text

__all__ = ["convergence", "courses", "draw_all", "growth", "portrait_name", "portraits", "rates"]


def portraits(records: list[Record]) -> Figure:
    """Return the paper's first figure: draws and training rows above, f below, one column per set."""
    figure, axes = plt.subplots(
        2, len(records), figsize=(3.6 * len(records), 7.0), squeeze=False, layout="constrained"
    )
    for column, record in zip(axes.T, records, strict=True):
        values = record["values"]
        (left, right), (low, high) = values["limits"]
        _cloud(column[0], values["draws"], MODEL_COLOUR, "draws")
        _cloud(column[0], values["data"], DATA_COLOUR, "data")
        column[0].set(title=record["cell"]["dataset"], xlim=(left, right), ylim=(low, high), aspect="equal")
        side = int(np.sqrt(len(values["f"])))
        f = np.reshape(values["f"], (side, side))
        # f is unbounded below away from the data; the upper part of its range is informative.
        shown = np.clip(f, np.quantile(f, 0.3), None)
        image = column[1].imshow(
            shown, origin="lower", extent=(left, right, low, high), interpolation="bilinear"
        )
        figure.colorbar(image, ax=column[1], shrink=0.7)
        column[1].set_title("learned f")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), markerscale=4, ncols=2, loc="outside lower center")
    return figure


def convergence(record: Record) -> Figure:
    """Return draws of the sampler at the recorded steps of a run from a random start."""
    snapshots, data = record["values"]["draws"], np.asarray(record["values"]["data"])
    columns = min(len(snapshots), 3 if len(snapshots) > 4 else 4)
    rows = -(-len(snapshots) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.2 * columns, 3.3 * rows), squeeze=False, layout="constrained"
    )
    centre, reach = 0.5 * (data.max(0) + data.min(0)), 0.65 * np.ptp(data, axis=0)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (step, draws) in zip(axes.flat, snapshots.items(), strict=False):
        _cloud(axis, data, DATA_COLOUR, "data")
        _cloud(axis, draws, MODEL_COLOUR, "draws")
        axis.set_xlim(centre[0] - reach[0], centre[0] + reach[0])
        axis.set_ylim(centre[1] - reach[1], centre[1] + reach[1])
        axis.set_aspect("equal")
        axis.set_title("initialisation" if step == "0" else f"{int(step):,} updates of f")
    figure.suptitle(record["cell"]["dataset"])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), markerscale=4, ncols=2, loc="outside lower center")
    return figure


def growth(records: list[Record]) -> Figure:
    """Return time and memory of a fit against the dimension and against the rows, one line per method."""
    sizes = {"rows": _fixed(records, "rows", "dim"), "dim": _fixed(records, "dim", "rows")}
    figure, axes = plt.subplots(2, 2, figsize=(9.0, 6.6), layout="constrained", sharey="row")
    for column, (moving, fixed) in zip(axes.T, (("dim", "rows"), ("rows", "dim")), strict=True):
        for axis, value, unit in zip(
            column, ("seconds", "megabytes"), ("seconds", "peak MB above the start"), strict=True
        ):
            for method in dict.fromkeys(record["cell"]["method"] for record in records):
                mine = good(records, method=method, **{fixed: sizes[fixed]})
                points = sorted((record["cell"][moving], record["values"][value]) for record in mine)
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=label(method))
            axis.set(
                xscale="log", yscale="log", xlabel={"dim": "dimensions", "rows": "rows"}[moving], ylabel=unit
            )
            seen = sorted(
                {record["cell"][moving] for record in records if record["cell"][fixed] == sizes[fixed]}
            )
            axis.set_xticks(seen, [f"{size:,}" for size in seen])
            axis.minorticks_off()
        column[0].set_title(f"{sizes[fixed]} {'rows' if fixed == 'rows' else 'dimensions'}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return figure


def _fixed(records: list[Record], name: str, moving: str) -> int:
    """Return the value of one size at which the other one takes most values."""
    seen: dict[int, set[int]] = {}
    for record in records:
        seen.setdefault(record["cell"][name], set()).add(record["cell"][moving])
    return max(seen, key=lambda value: len(seen[value]))


def rates(records: list[Record]) -> Figure:
    """Return the divergence from the truth against the rows, with the slope of each method."""
    figure, axis = plt.subplots(figsize=(6.0, 4.4), layout="constrained")
    for method in dict.fromkeys(record["cell"]["method"] for record in records):
        mine = good(records, method=method)
        sizes = sorted({record["cell"]["rows"] for record in mine})
        means = [np.mean([r["values"]["kl"] for r in good(mine, rows=size)]) for size in sizes]
        line = axis.plot(sizes, means, marker="o", label=f"{label(method)}: slope {slope_text(slope(mine))}")[
            0
        ]
        axis.scatter(
            [record["cell"]["rows"] for record in mine], [record["values"]["kl"] for record in mine],
            s=8, alpha=0.4, linewidths=0, color=line.get_color(),
        )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="training rows", ylabel="KL(truth ‖ fit), nats")
    axis.legend()
    return figure


def courses(records: list[Record]) -> Figure:
    """Return the NLL above the truth's against processor time, by base: whole runs where f was kept during
    the run, and otherwise their ends."""
    bases = list(dict.fromkeys(record["cell"]["base"] for record in records))
    figure, axes = plt.subplots(
        1, len(bases), figsize=(5.0 * len(bases), 5.4), squeeze=False, sharey=True, layout="constrained"
    )
    methods = list(dict.fromkeys(record["cell"]["method"] for record in records))
    for axis, base in zip(axes[0], bases, strict=True):
        for record in chosen(records, base=base):
            values, place = record["values"], methods.index(record["cell"]["method"])
            if not normalised(values):
                continue
            ends = [*values.get("path", [])[:-1], (values["processor_seconds"], values["nll"])]
            points = [(seconds, nll - values["truth_nll"]) for seconds, nll in ends if nll is not None]
            style = {"color": f"C{place % 10}", "marker": "os"[place // 10], "markersize": 4}
            axis.plot(*zip(*points, strict=True), **style, label=record["cell"]["method"])
        axis.set(
            title=f"{base} base", xlabel="processor seconds", ylabel="NLL − truth, nats", ylim=(2.0, 8.0)
        )
    labels = {
        name: line for axis in axes[0] for line, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labels.values(), labels.keys(), ncols=2, loc="outside lower center", fontsize="small")
    return figure


def portrait_name(method: str) -> str:
    """Return the name of the file with a method's samples and f; the default's is the plain one."""
    return "samples-and-f" if method == "auto" else f"samples-and-f-{method}"


def draw_all(records: dict[str, list[Record]], folder: Path) -> list[Path]:
    """Write every figure that the records allow into the folder, and return their paths."""
    made: dict[str, Figure] = {}
    portrayed = good(records.get("figures", []), measure="portrait")
    for method in dict.fromkeys(record["cell"]["method"] for record in portrayed):
        made[portrait_name(method)] = portraits(good(portrayed, method=method))
    for record in good(records.get("figures", []), measure="convergence"):
        made[f"convergence-{record['cell']['dataset']}"] = convergence(record)
    if good(records.get("cost", [])):
        made["cost"] = growth(records["cost"])
    if good(records.get("rate", [])):
        made["rate"] = rates(records["rate"])
    if good(records.get("reach", [])):
        made["reach"] = courses(good(records["reach"]))
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in made.items():
        paths.append(folder / f"{name}.png")
        # Without the name of the program that drew it, equal records give equal files.
        figure.savefig(paths[-1], dpi=80, metadata={"Software": None})
        plt.close(figure)
    return paths


def _cloud(axis: plt.Axes, points: ArrayLike, colour: str, label: str) -> None:
    points = np.asarray(points)
    axis.scatter(points[:, 0], points[:, 1], s=4, color=colour, alpha=0.6, linewidths=0, label=label)
