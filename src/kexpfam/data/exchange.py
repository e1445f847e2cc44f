"""Tables as bytes and back: what processes tell each other, in formats that run no code.

Arrays are safetensors, frames are Arrow's, and cells of any kind are JSON.
"""

import json
from collections.abc import Callable
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
import safetensors.numpy

from kexpfam.data.frames import layout_of

__all__ = ["from_bytes", "to_bytes"]

ARRAY, CELLS = "array", "cells"


def to_bytes(arrays: dict[str, np.ndarray], tables: tuple[Any, ...] = ()) -> bytes:
    """Return named arrays of numbers, and tables, as bytes."""
    kinds = [_kind(table) for table in tables]
    tensors = {f"array.{name}": np.array(values) for name, values in arrays.items()}
    tensors |= {
        f"table.{k}": _PACKED[kind](table) for k, (kind, table) in enumerate(zip(kinds, tables, strict=True))
    }
    return safetensors.numpy.save(tensors, {"kinds": json.dumps(kinds)})


def from_bytes(content: bytes) -> tuple[dict[str, np.ndarray], tuple[Any, ...]]:
    """Return the arrays and the tables that were made bytes."""
    tensors = safetensors.numpy.load(content)
    size = int.from_bytes(content[:8], "little")
    kinds = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["kinds"])
    arrays = {
        name.removeprefix("array."): values for name, values in tensors.items() if name.startswith("array.")
    }
    return arrays, tuple(_UNPACKED[kind](tensors[f"table.{k}"]) for k, kind in enumerate(kinds))


def _kind(table: Any) -> str:
    layout = layout_of(table)
    if layout is not None:
        return f"{layout.backend}.series" if layout.series else layout.backend
    return ARRAY if np.asarray(table).dtype.kind in "biuf" else CELLS


def _bytes(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def _from_cells(table: Any) -> np.ndarray:
    values = np.asarray(table, dtype=object)
    plain = lambda cell: cell.item() if isinstance(cell, np.generic) else str(cell)
    return _bytes(json.dumps([values.shape, values.ravel().tolist()], default=plain).encode())


def _to_cells(content: np.ndarray) -> np.ndarray:
    shape, cells = json.loads(content.tobytes())
    values = np.empty(len(cells), object)
    values[:] = cells
    return values.reshape(shape)


def _from_frame(table: Any) -> np.ndarray:
    import pyarrow

    wrapped = nw.from_native(table, eager_only=True, allow_series=True)
    if isinstance(wrapped, nw.Series):
        wrapped = wrapped.alias("" if wrapped.name is None else wrapped.name).to_frame()
    native = wrapped.to_native()
    # pandas' own types are in the metadata that only this way of going has.
    pandas = wrapped.implementation.value == "pandas"
    arrow = pyarrow.Table.from_pandas(native, preserve_index=False) if pandas else wrapped.to_arrow()
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, arrow.schema) as writer:
        writer.write_table(arrow)
    return _bytes(sink.getvalue().to_pybytes())


def _to_arrow(content: np.ndarray) -> Any:
    import pyarrow

    return pyarrow.ipc.open_stream(content.tobytes()).read_all()


def _to_polars(content: np.ndarray) -> Any:
    import polars

    return polars.from_arrow(_to_arrow(content))


def _column(frame: Any) -> Any:
    wrapped = nw.from_native(frame, eager_only=True)
    return wrapped[wrapped.columns[0]].to_native()


_FRAMES = {
    "pandas": lambda content: _to_arrow(content).to_pandas(),
    "polars": _to_polars,
    "pyarrow": _to_arrow,
}
_SERIES = {
    f"{name}.series": lambda content, frame=frame: _column(frame(content)) for name, frame in _FRAMES.items()
}
_PACKED: dict[str, Callable[[Any], np.ndarray]] = {name: _from_frame for name in (*_FRAMES, *_SERIES)}
_PACKED |= {ARRAY: np.array, CELLS: _from_cells}
_UNPACKED: dict[str, Callable[[np.ndarray], Any]] = (
    {ARRAY: lambda values: values, CELLS: _to_cells} | _FRAMES | _SERIES
)
