"""What all pictures share: figures that pyplot does not know, colours, names of columns, and how much of a table is shown."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure

__all__ = [
    "DATA_COLOUR",
    "DENSITY_COLOURS",
    "MODEL_COLOUR",
    "Picture",
    "bare_arrays",
    "column_at",
    "comparable",
    "feature_names",
    "frame",
    "legend_above",
    "one_panel",
    "panels",
    "plain_text",
    "scatter",
    "some_rows",
    "target_names",
]

# Both can be read on white and on black, and by eyes that do not tell red from green.
DATA_COLOUR, MODEL_COLOUR = "#d9622b", "#2f7fc1"
# No density is no colour: the map lies on any page.
DENSITY_COLOURS = LinearSegmentedColormap.from_list(
    "density", [to_rgba(MODEL_COLOUR, alpha) for alpha in (0.0, 1.0)]
)
# Axes share a scale unless one is this many times longer than the other.
MOST_STRETCHED = 3.0
# More points than this make a cloud black, and a file large.
MOST_POINTS = 2000


class Picture(Figure):
    """A figure that a notebook shows although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()


def panels(
    count: int, *, width: float, height: float, columns: int | None = None, boxed: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure with this many panels of that size (inches), in rows of ``columns``, by default in one row."""
    columns = min(columns or count, count)
    rows = -(-count // columns)
    figure = Picture(figsize=(width * columns, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(boxed)
        plain_text(axis)
    return figure, axes


def one_panel(ax: Axes | None, *, width: float, height: float, boxed: bool = False) -> tuple[Figure, Axes]:
    """Return the axes that were given and their figure, or those of a new one of that size (inches)."""
    if ax is None:
        figure, (ax,) = panels(1, width=width, height=height, boxed=boxed)
        return figure, ax
    plain_text(ax)
    return cast(Figure, ax.figure), ax


def legend_above(axis: Axes) -> None:
    """Name what is drawn above the panel, where it covers nothing."""
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=3,
        frameon=False,
        borderaxespad=0.0,
        handlelength=1.4,
    )


def plain_text(axis: Axes) -> None:
    """Have labels and title shown as they are: a dollar in the name of a column starts no formula."""
    for label in (axis.xaxis.label, axis.yaxis.label, axis.title):
        label.set_parse_math(False)


@contextlib.contextmanager
def bare_arrays() -> Iterator[None]:
    """Let a model that was fitted to a frame take arrays, whose columns have no names, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        yield


def feature_names(estimator: Any, count: int) -> list[str]:
    """Return the names of the columns that a model was fitted to: x0, x1, ... where they had none."""
    return [
        str(name) for name in getattr(estimator, "column_names_", None) or [f"x{k}" for k in range(count)]
    ]


def target_names(estimator: Any, count: int) -> list[str]:
    """Return the names of the targets of a conditional model: y, or y0, y1, ... where they had none."""
    unnamed = ["y"] if count == 1 else [f"y{k}" for k in range(count)]
    return [str(name) for name in getattr(estimator, "target_names_", None) or unnamed]


def column_at(wanted: int | str, names: Sequence[str], what: str = "feature") -> int:
    """Return the place of a column that is given by its name or its place."""
    if isinstance(wanted, str):
        if wanted not in names:
            raise ValueError(f"unknown {what} {wanted!r}: choose one of {', '.join(names)}.")
        return list(names).index(wanted)
    if not 0 <= wanted < len(names):
        raise ValueError(f"{what} must be from 0 to {len(names) - 1}, got {wanted}.")
    return int(wanted)


def some_rows(rows: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Return the rows, or ``most`` of them in equal steps where there are more."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]


def frame(data: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of a box around the data and all but the outermost draws, which would make the rest small."""
    shown = np.concatenate([data, np.nanpercentile(draws, [0.5, 99.5], axis=0)])
    low, high = np.nanmin(shown, axis=0), np.nanmax(shown, axis=0)
    return low - 0.08 * (high - low), high + 0.08 * (high - low)


def comparable(spans: np.ndarray) -> bool:
    """Return whether two columns can share a scale; otherwise one of them would be drawn as a line."""
    return bool(spans.max() < MOST_STRETCHED * spans.min())


def scatter(axis: Axes, data: np.ndarray | None, draws: np.ndarray, *, size: float = 5.0) -> None:
    """Draw two columns of the data over two of the draws; a cloud of many points is an image in files of lines."""
    for rows, colour, label in ((draws, MODEL_COLOUR, "draws"), (data, DATA_COLOUR, "data")):
        if rows is not None:
            look: dict[str, Any] = {
                "s": size,
                "color": colour,
                "alpha": 0.6,
                "linewidths": 0,
                "label": label,
                "rasterized": True,
            }
            axis.scatter(rows[:, 0], rows[:, 1], **look)
