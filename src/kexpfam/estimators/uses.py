"""Objects that the use of a fitted density returns: explanations of rows, and a monitor of drift."""

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from kexpfam import storage
from kexpfam.data.encoding import TableSchema
from kexpfam.data.frames import Layout, framed
from kexpfam.judge.drift import Martingales, log_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Explanation", "Monitor"]


class Explanation(NamedTuple):
    """The surprise of each cell in nats, its value, and the usual value with an interval.

    Arrays have the shape (rows, columns); labels are codes of ``columns``. Missing cells have the surprise
    0, cells outside the support infinity. The usual value is the conditional median, or the most probable
    label, given the other cells of the row.
    """

    columns: TableSchema
    values: Float[np.ndarray, "n d"]
    surprise: Float[np.ndarray, "n d"]
    usual: Float[np.ndarray, "n d"]
    lower: Float[np.ndarray, "n d"]
    upper: Float[np.ndarray, "n d"]
    p_values: Float[np.ndarray, " n"]
    backend: str = "pyarrow"

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""
        return [str(name) for name in self.columns.shown]

    @property
    def first(self) -> list[str]:
        """Return the most surprising column of each row."""
        return [self.names[j] for j in self.surprise.argmax(axis=1)]

    def cell(self, row: int, column: int) -> str:
        """Return a cell beside its usual value with four digits, as text."""
        value = self._text(self.values[row, column], column)
        estimates = [float(f"{part[row, column]:.4g}") for part in (self.usual, self.lower, self.upper)]
        usual, low, high = (self._text(estimate, column) for estimate in estimates)
        interval = "" if self.columns.kinds[column].categorical else f", {low} to {high}"
        return f"{value} (usual: {usual}{interval})"

    def records(self) -> dict[str, np.ndarray]:
        """Return one line per cell, the most surprising cell of each row first.

        Values are numbers, or texts if there are columns of labels."""
        rows, count = self.surprise.shape
        order = np.argsort(-self.surprise, axis=1).ravel()
        row = np.repeat(np.arange(rows), count)
        labels = any(kind.categorical for kind in self.columns.kinds)
        found = {
            "row": row,
            "p_value": self.p_values[row],
            "column": np.array(self.names, object)[order],
            "surprise": self.surprise[row, order],
        }
        for name in ("values", "usual", "lower", "upper"):
            own = getattr(self, name)[row, order]
            cells = zip(own.tolist(), order.tolist(), strict=True)
            texts = [self._text(value, j) for value, j in cells] if labels else own
            found[name.removesuffix("s")] = np.array(texts, object if labels else float)
        return found

    def frame(self) -> Any:
        """Return ``records`` as a frame of the library that the rows came in, by default a pyarrow table."""
        found = self.records()
        types = {"i": "Int64", "f": "Float64", "O": "String"}
        return framed(
            list(found.values()),
            Layout(self.backend, list(found), [types[column.dtype.kind] for column in found.values()]),
        )

    def plot(self, row: int = 0) -> "Figure":
        """Return a figure of the surprise of each column of one row."""
        from kexpfam.plot import plot_explanation  # matplotlib is slow to import

        return plot_explanation(self, row)

    def _text(self, value: float, column: int) -> str:
        if np.isnan(value):
            return ""
        kind = self.columns.kinds[column]
        if not kind.categorical:
            return f"{value:.6g}"
        return "unknown" if value < 0.0 else str(kind.cells(np.array([value]), whole=True)[0])


class Monitor:
    """A test, after each new row, of whether new rows are exchangeable with those of a fit.

    There is a test of the log density and one of each column. Each has an amount of evidence (the wealth of
    a conformal test martingale), which is 1 at the start and does not rise on average without drift. The
    alarm is raised once the mean of all evidence reaches ``1 / level``: without drift this happens with at
    most the probability ``level``, however many rows are tested.

    Attributes
    ----------
    log_evidence : array of shape (rows, columns + 1)
        Natural logarithm of the evidence after each row: of the log density, then of each column.
    """

    def __init__(self, model: Any, martingales: Martingales, level: float) -> None:
        self._model, self._martingales, self.level = model, martingales, level

    @property
    def names(self) -> list[str]:
        """Return the names of the tests."""
        return ["log density", *map(str, self._model._monitored_names)]

    @property
    def rows(self) -> int:
        """Return the number of rows that were tested."""
        return len(self._martingales.log_wealth)

    @property
    def log_evidence(self) -> np.ndarray:
        own, columns = self._martingales.log_wealth, len(self.names) - 1
        parts = own.shape[1] - columns
        return np.concatenate([log_mean(own[:, :parts])[:, None], own[:, parts:]], axis=1)

    @property
    def log_total(self) -> np.ndarray:
        """Return the logarithm of the mean evidence after each row."""
        return log_mean(self.log_evidence)

    @property
    def alarm_row(self) -> int | None:
        """Return the number of rows after which the alarm was raised, or None."""
        raised = np.flatnonzero(self.log_total >= -np.log(self.level))
        return int(raised[0]) + 1 if len(raised) else None

    @property
    def alarm(self) -> bool:
        """Return whether the alarm was raised."""
        return self.alarm_row is not None

    @property
    def drifted(self) -> list[str]:
        """Return the tests whose own evidence reached the limit for several tests, the strongest first."""
        top = self.log_evidence.max(axis=0, initial=-np.inf)
        limit = np.log(len(self.names)) - np.log(self.level)
        return [self.names[k] for k in np.argsort(-top) if top[k] >= limit]

    def update(self, X: Any, y: Any = None) -> bool:
        """Test new rows in their order; return whether the alarm was raised."""
        self._martingales.update(self._model._monitored(X, y))
        return self.alarm

    def plot(self) -> "Figure":
        """Return a figure of the evidence after each row."""
        from kexpfam.plot import plot_monitor  # matplotlib is slow to import

        return plot_monitor(self)

    def save(self, path: str | os.PathLike) -> None:
        """Write the state to a file, from which ``monitor(state=path)`` of the model goes on."""
        state = {"level": self.level, **self._martingales.state()}
        storage.save_tree(path, "Monitor", state, {"names": self.names})

    @classmethod
    def load(cls, model: Any, path: str | os.PathLike) -> "Monitor":
        """Return the monitor of a model with the state of a file."""
        kind, state, metadata = storage.load_tree(path)
        found = cls(model, Martingales.restored(state), state["level"]) if kind == "Monitor" else None
        if found is None or metadata["names"] != found.names:
            raise storage.StorageError(f"{path} is not the state of a monitor of this model.")
        return found

    def __str__(self) -> str:
        if not self.rows:
            return "no rows tested"
        evidence = f"evidence of drift {np.exp(min(self.log_total[-1], 700.0)):.3g} after {self.rows} rows"
        where = f"; largest in {', '.join(self.drifted)}" if self.drifted else ""
        return f"{evidence}: {f'alarm at row {self.alarm_row}{where}' if self.alarm else 'no alarm'}"
