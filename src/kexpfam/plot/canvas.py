"""Shared parts of the figures: panels without pyplot, colours, column names, limits of axes."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kexpfam.settings import one_of

# Both colours are legible on white and on black, and distinct with red-green colour blindness.
DATA_COLOUR = "#d9622b"
MODEL_COLOUR = "#2f7fc1"
# Density 0 is transparent.
DENSITY_COLOURS = LinearSegmentedColormap.from_list("density", [f"{MODEL_COLOUR}00", MODEL_COLOUR])


class Picture(Figure):
    """A figure that a notebook displays without pyplot."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()


def panels(
    count: int, ax: Axes | None = None, *, width: float, height: float, columns: int = 99, boxed: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` panels of this size (inches), in rows of ``columns``.

    If axes are given, they are returned alone, with their figure.
    """
    if ax is not None:
        plain_text(ax)
        return cast(Figure, ax.figure), [ax]
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Picture(figsize=(width * columns, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(boxed)
        plain_text(axis)
    return figure, axes


def legend_above(axis: Axes) -> None:
    """Add a legend above the panel."""
    position: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.0}
    axis.legend(ncols=3, frameon=False, handlelength=1.4, **position)


def plain_text(axis: Axes) -> None:
    """Show labels and title verbatim: a dollar sign in a column name starts no formula."""
    for label in (axis.xaxis.label, axis.yaxis.label, axis.title):
        label.set_parse_math(False)


@contextlib.contextmanager
def bare_arrays() -> Iterator[None]:
    """Suppress the warning of a model that was fitted to a frame and receives arrays without column names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        yield


def feature_names(estimator: Any, count: int) -> list[str]:
    """Return the names seen in fit of the columns that are modelled, or x0, x1, ..."""
    names = getattr(estimator, "column_names_", None)
    # A density has no carried columns.
    places = getattr(getattr(estimator, "_columns", None), "places", None) or range(count)
    return [f"x{k}" if names is None else str(names[k]) for k in places]


def target_names(estimator: Any, count: int) -> list[str]:
    """Return the target names of a conditional model or of its ``given(x)``: by default y, or y0, y1, ..."""
    names = getattr(estimator, "target_names_", None) or getattr(estimator, "target_names", None)
    return [str(name) for name in names or (["y"] if count == 1 else [f"y{k}" for k in range(count)])]


def column_at(wanted: int | str, names: Sequence[str], noun: str = "feature") -> int:
    """Return the position of a column that is given by name or by position."""
    if isinstance(wanted, str):
        one_of(noun, wanted, names)
        return list(names).index(wanted)
    if not 0 <= wanted < len(names):
        raise ValueError(f"{noun} must be from 0 to {len(names) - 1}, got {wanted}.")
    return int(wanted)


def shortened(text: str, most: int) -> str:
    """Return the text with at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def some_rows(rows: np.ndarray, most: int = 2000) -> np.ndarray:
    """Return the rows, or ``most`` of them at equal steps."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]


def axis_limits(data: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of a box around the data and the central 99 % of the draws of each column."""
    shown = np.concatenate([data, np.nanpercentile(draws, [0.5, 99.5], axis=0)])
    low, high = np.nanmin(shown, axis=0), np.nanmax(shown, axis=0)
    margin = 0.08 * (high - low)
    return low - margin, high + margin


def aspect(spans: np.ndarray, most: float = 3.0) -> str:
    """Return "equal", or "auto" if one of two spans is ``most`` times the other or more."""
    return "equal" if spans.max() < most * spans.min() else "auto"


def scatter(axis: Axes, rows: np.ndarray, *, alpha: float = 0.6, **look: Any) -> None:
    """Draw the first two columns of the rows, rasterized in vector files."""
    axis.scatter(rows[:, 0], rows[:, 1], alpha=alpha, linewidths=0, rasterized=True, **look)


def scatter_both(axis: Axes, data: np.ndarray, draws: np.ndarray, *, size: float = 5.0) -> None:
    """Draw two columns of the data over two columns of the draws."""
    scatter(axis, draws, alpha=0.4, s=size, color=MODEL_COLOUR, label="draws")
    scatter(axis, data, alpha=0.9, s=size, color=DATA_COLOUR, label="data")
