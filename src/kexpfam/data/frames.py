"""Frames of pandas, polars and Arrow, through narwhals.

The ``Layout`` of a training table (library, names and types of the columns) is the form of draws and
predictions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import narwhals.stable.v2 as nw
import numpy as np

BACKENDS = ("pandas", "polars", "pyarrow")
FLOATS = ("Float16", "Float32", "Float64")
INTEGERS = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
# Types that output columns are cast to.
RESTORED = (*FLOATS, *INTEGERS, "Boolean", "Categorical", "String")


class Layout(NamedTuple):
    """The form of a table: library, names and types of the columns, and whether it is a series."""

    backend: str
    names: list[Any]
    dtypes: list[str]
    series: bool = False

    @property
    def texts(self) -> list[str]:
        """Return the names as strings; names in pandas may be numbers or tuples."""
        return [str(name) for name in self.names]


def layout_of(table: Any) -> Layout | None:
    """Return the layout of a frame or a series, or None for an array or a list."""
    found = wrapped(table)
    if found is None:
        return None
    backend = found.implementation.value
    if isinstance(found, nw.Series):
        name = "y" if found.name in (None, "") else found.name
        return Layout(backend, [name], [_type_name(found.dtype)], series=True)
    return Layout(backend, list(found.columns), [_type_name(dtype) for dtype in found.schema.values()])


def as_table(table: Any) -> Any:
    """Return a table that scikit-learn accepts; masked cells are NaN."""
    if isinstance(table, np.ma.MaskedArray):
        return np.ma.filled(table.astype(float), np.nan)
    found = wrapped(table)
    if isinstance(found, nw.DataFrame):
        return found.to_native()
    return table if found is None else found.to_numpy()


def framed(columns: Sequence[np.ndarray], layout: Layout, index: Any = None) -> Any:
    """Return columns as a frame or series of the layout; the index is used by pandas only."""
    described = zip(columns, layout.texts, layout.dtypes, strict=True)
    series = [_series(column, name, dtype, layout.backend) for column, name, dtype in described]
    if layout.series:
        native = series[0].to_native()
    else:
        frame = nw.from_dict({str(place): column for place, column in enumerate(series)})
        if layout.backend != "pandas":
            frame = frame.rename(dict(zip(frame.columns, layout.texts, strict=True)))
        native = frame.to_native()
    if layout.backend != "pandas":
        return native
    # Only pandas has an index, and names that are not strings.
    if not layout.series:
        native.columns = layout.names
        if layout.names and all(isinstance(name, tuple) for name in layout.names):
            import pandas

            native.columns = pandas.MultiIndex.from_tuples(layout.names)
    if index is not None:
        native.index = index
    return native


def row_name(names: Sequence[str]) -> str:
    """Return the name of the column of row numbers of draws; underscores are added if it exists."""
    name = "row"
    while name in names:
        name += "_"
    return name


def wrapped(table: Any) -> nw.DataFrame | nw.Series | None:
    """Return a frame or a series wrapped by narwhals, or None for other tables."""
    if isinstance(table, np.ndarray | list | tuple):  # the tests of narwhals take longer than a score
        return None
    table = arrow_table(table)
    if isinstance(table, nw.LazyFrame) or nw.dependencies.is_into_lazyframe(table):
        raise TypeError(f"{type(table).__name__} is a lazy query: call collect() on it first.")
    if nw.dependencies.is_into_dataframe(table):
        columns = getattr(nw.to_native(table, pass_through=True), "columns", ())
        names = [name for name in columns if isinstance(name, str | int | tuple)]
        repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if repeated:
            raise ValueError(f"several columns are called {', '.join(map(repr, repeated))}: rename them.")
        return nw.from_native(table, eager_only=True)
    if nw.dependencies.is_into_series(table):
        return nw.from_native(table, series_only=True)
    return None


def arrow_table(table: Any) -> Any:
    """Return Arrow batches and arrays as a table or a chunked array, which narwhals supports."""
    kind = type(table)
    if not kind.__module__.startswith("pyarrow") or kind.__name__ in ("Table", "ChunkedArray"):
        return table
    import pyarrow

    if isinstance(table, pyarrow.RecordBatch):
        return pyarrow.Table.from_batches([table])
    return pyarrow.chunked_array([table]) if isinstance(table, pyarrow.Array) else table


def _type_name(dtype: Any) -> str:
    return type(dtype).__name__ if not isinstance(dtype, type) else dtype.__name__


def _series(column: np.ndarray, name: str, dtype: str, backend: Any) -> nw.Series:
    """Return one column, in its original type if the values permit it."""
    values = column.tolist() if column.dtype.kind in "OUST" else np.ascontiguousarray(column)
    try:
        __import__(backend)
    except ImportError:
        raise ImportError(
            f"the training data was a {backend} frame, which is not installed: pip install {backend}, or use "
            "arrays with set_output(transform='numpy')."
        ) from None
    series, kind = nw.new_series(name, values, backend=backend), column.dtype.kind
    fits = (
        (dtype in FLOATS and kind == "f")
        or (dtype in INTEGERS and kind in "iu")
        or (dtype in RESTORED and kind in "bOUST")
    )
    return series.cast(getattr(nw, dtype)) if fits and dtype != _type_name(series.dtype) else series
