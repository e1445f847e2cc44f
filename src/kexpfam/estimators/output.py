"""What estimators give back: rows in the form in which rows came in, or in the one that was asked for."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from sklearn import get_config

from kexpfam.data.frames import BACKENDS, Layout, framed, layout_of, row_name

__all__ = ["FrameOutput"]

# "default" is what came in; scikit-learn's word for it, as for the names of the libraries.
OUTPUTS = ("default", "numpy", *BACKENDS)


class FrameOutput:
    """The form of an estimator's rows: draws and predictions have the library, names and types of the data.

    ``score_samples``, ``quantile`` and the like are numbers about rows, and arrays always.
    """

    _layout: Layout | None = None
    _target_layout: Layout | None = None
    column_names_: list[str]
    target_names_: list[str]

    def set_output(self, *, transform: str | None = None) -> Self:
        """Choose what ``sample`` and ``predict`` give back.

        "default" is a frame where a frame came in: of draws of a density the training data, else the argument X. "numpy" is
        arrays always; "pandas", "polars" and "pyarrow" are frames of that library always. None changes nothing.
        ``sklearn.set_config(transform_output=...)`` says the same for estimators that were not told.
        """
        if transform is not None:
            if transform not in OUTPUTS:
                raise ValueError(f"unknown output {transform!r}: choose one of {', '.join(OUTPUTS)}.")
            # scikit-learn's own attribute, which clone() copies.
            self._sklearn_output_config = {"transform": transform}
        return self

    def _note_layout(self, X: Any, y: Any = None) -> None:
        """Keep the form of the training data; names of an earlier fit to frames are forgotten."""
        for kind, table in (("", X), ("_target", y)):
            layout, earlier = layout_of(table), getattr(self, f"{kind}_layout")
            setattr(self, f"{kind}_layout", layout)
            name = "target_names_" if kind else "column_names_"
            if layout is not None:
                setattr(self, name, layout.texts)
            elif earlier is not None:
                vars(self).pop(name, None)

    def _rows_like(self, X: Any, values: np.ndarray, names: Sequence[str]) -> Any:
        """Return rows of the table that the model was fitted to, or of targets for the rows of X: in the form of X."""
        layout = self._layout if X is None else self._targets_beside(X, names, flat=values.ndim == 1)
        layout = self._asked_for(layout, names, flat=values.ndim == 1)
        if layout is None:
            return values
        columns = [values] if values.ndim == 1 else list(values.T)
        return framed(columns, layout, _index(X) if layout.backend == "pandas" else None)

    def _draws_like(self, X: Any, draws: np.ndarray, names: Sequence[str]) -> Any:
        """Return draws of targets for each row of X, (n, draws, p): one below the other, with the row they belong to."""
        layout = self._asked_for(self._targets_beside(X, names, flat=False), names, flat=False)
        if layout is None:
            return None
        rows, count, width = draws.shape
        layout = layout._replace(
            names=[row_name(layout.texts), *layout.names], dtypes=["Int64", *layout.dtypes]
        )
        columns = [np.repeat(np.arange(rows), count), *draws.reshape(-1, width).T]
        index = _index(X) if layout.backend == "pandas" else None
        return framed(columns, layout, None if index is None else index.repeat(count))

    def _targets_beside(self, X: Any, names: Sequence[str], *, flat: bool) -> Layout | None:
        """Return the layout of targets that stand beside a frame X."""
        beside = layout_of(X)
        if beside is None:
            return None
        own = self._target_layout or Layout(beside.backend, list(names), ["Float64"] * len(names))
        return own._replace(backend=beside.backend, series=flat)

    def _asked_for(self, layout: Layout | None, names: Sequence[str], *, flat: bool) -> Layout | None:
        """Return the layout in the form that the user has chosen."""
        chosen = getattr(self, "_sklearn_output_config", get_config())
        wanted = chosen.get("transform", chosen.get("transform_output", "default"))
        if wanted == "default":
            return layout
        if wanted == "numpy":
            return None
        plain = Layout(wanted, list(names), ["Float64"] * len(names), series=flat)
        return plain if layout is None else layout._replace(backend=wanted)


def _index(X: Any) -> Any:
    """Return the index of a frame of pandas, or None."""
    layout = None if X is None else layout_of(X)
    return X.index if layout is not None and layout.backend == "pandas" and hasattr(X, "index") else None
