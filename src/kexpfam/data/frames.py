"""Frames of any library in and out: pandas, polars and Arrow behind narwhals, and arrays as they are.

What a table was is kept as a ``Layout``: the library, the names and the types of the columns. Draws and predictions are given
that form again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import narwhals.stable.v2 as nw
import numpy as np

__all__ = ["BACKENDS", "Layout", "as_table", "framed", "layout_of", "row_name"]

BACKENDS = ("pandas", "polars", "pyarrow")
FLOATS = ("Float16", "Float32", "Float64")
INTEGERS = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
# The types that cells can be given back in; any other is left as it comes.
RESTORED = (*FLOATS, *INTEGERS, "Boolean", "Categorical", "String")


class Layout(NamedTuple):
    """The form of a table: library, names and types of the columns; a ``series`` is a column that stands alone."""

    backend: str
    names: list[Any]
    dtypes: list[str]
    series: bool = False

    @property
    def texts(self) -> list[str]:
        """Return the names as texts: pandas has columns that are called 0, or ("a", "b")."""
        return [str(name) for name in self.names]


def layout_of(table: Any) -> Layout | None:
    """Return the layout of a frame or a series, or None if the table is an array, a list and the like."""
    found = _native(table)
    if isinstance(found, nw.DataFrame):
        schema = found.schema
        return Layout(
            found.implementation.value,
            list(found.columns),
            [_type_name(schema[name]) for name in found.columns],
        )
    if isinstance(found, nw.Series):
        backend = found.implementation.value
        return Layout(
            backend, ["y" if found.name in (None, "") else found.name], [_type_name(found.dtype)], series=True
        )
    return None


def as_table(table: Any) -> Any:
    """Return what scikit-learn's checks understand: frames of a kind it knows, arrays with NaN where they were masked."""
    if isinstance(table, np.ma.MaskedArray):
        return np.ma.filled(table.astype(float), np.nan)
    found = _native(table)
    if isinstance(found, nw.DataFrame):
        return found.to_native()
    return table if found is None else found.to_numpy()


def framed(columns: Sequence[np.ndarray], layout: Layout, index: Any = None) -> Any:
    """Return columns as a frame of the layout, or as a series; an index is for pandas, which alone has one."""
    described = zip(columns, layout.texts, layout.dtypes, strict=True)
    series = [_series(column, name, dtype, layout.backend) for column, name, dtype in described]
    if layout.series:
        (found,) = series
        native = found.to_native()
    else:
        native = nw.from_dict({str(place): column for place, column in enumerate(series)}).to_native()
    if layout.backend != "pandas":
        return native if layout.series else nw.from_native(native).rename(_renaming(layout)).to_native()
    # Only pandas has names that are no texts, and rows that have names.
    if not layout.series:
        native.columns = _pandas_names(layout.names)
    if index is not None:
        native.index = index
    return native


def row_name(names: Sequence[str]) -> str:
    """Return what to call the column that tells the row of each draw; a name that is taken gets a low line."""
    name = "row"
    while name in names:
        name += "_"
    return name


def _renaming(layout: Layout) -> dict[str, str]:
    return {str(place): name for place, name in enumerate(layout.texts)}


def _pandas_names(names: list[Any]) -> Any:
    if names and all(isinstance(name, tuple) for name in names):
        import pandas

        return pandas.MultiIndex.from_tuples(names)
    return names


def _native(table: Any) -> nw.DataFrame | nw.Series | None:
    """Return the table as narwhals sees it, or None if it is no frame."""
    table = _arrow_table(table)
    if isinstance(table, nw.LazyFrame) or nw.dependencies.is_into_lazyframe(table):
        raise TypeError(
            f"{type(table).__name__} is a query that has not been run: call collect() on it first."
        )
    if nw.dependencies.is_into_dataframe(table):
        _check_names(getattr(nw.to_native(table, pass_through=True), "columns", ()))
        return nw.from_native(table, eager_only=True)
    if nw.dependencies.is_into_series(table):
        return nw.from_native(table, series_only=True)
    return None


def _arrow_table(table: Any) -> Any:
    """Return Arrow's batches and arrays as the table or the chunked array that narwhals knows."""
    kind = type(table)
    if not kind.__module__.startswith("pyarrow") or kind.__name__ in ("Table", "ChunkedArray"):
        return table
    import pyarrow

    if isinstance(table, pyarrow.RecordBatch):
        return pyarrow.Table.from_batches([table])
    return pyarrow.chunked_array([table]) if isinstance(table, pyarrow.Array) else table


def _check_names(names: Any) -> None:
    """Raise if two columns of a frame of pandas have one name; in other libraries none can."""
    names = [name for name in names if isinstance(name, str | int | tuple)]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise ValueError(
            f"several columns are called {', '.join(map(repr, repeated))}: rename them, names tell columns apart."
        )


def _type_name(dtype: Any) -> str:
    return type(dtype).__name__ if not isinstance(dtype, type) else dtype.__name__


def _series(column: np.ndarray, name: str, dtype: str, backend: Any) -> nw.Series:
    """Return one column in the type it had, if its values can have that type."""
    _need(backend)
    values = column.tolist() if column.dtype.kind in "OUST" else np.ascontiguousarray(column)
    series = nw.new_series(name, values, backend=backend)
    kind = column.dtype.kind
    fits = (
        (dtype in FLOATS and kind == "f")
        or (dtype in INTEGERS and kind in "iu")
        or (dtype in RESTORED and kind in "bOUST")
    )
    return (
        series.cast(getattr(nw, dtype))
        if fits and dtype in RESTORED and dtype != _type_name(series.dtype)
        else series
    )


def _need(backend: str) -> None:
    try:
        __import__(backend)
    except ImportError:
        raise ImportError(
            f"the data came as a frame of {backend}, which is not installed here: pip install {backend}, or have arrays given "
            "back with set_output(transform='numpy')."
        ) from None
