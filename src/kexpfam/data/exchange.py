"""Tables as bytes, for the exchange between processes, in formats that run no code.

Arrays are stored as safetensors, frames as Arrow streams, other cells as JSON.
"""

import json
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
import safetensors.numpy

from kexpfam.data.frames import layout_of

ARRAY, CELLS, SERIES = "array", "cells", ".series"


def to_bytes(arrays: dict[str, np.ndarray], tables: tuple[Any, ...] = ()) -> bytes:
    """Return named arrays of numbers, and tables, as bytes."""
    packed = [_packed(table) for table in tables]
    tensors = {f"array.{name}": np.array(values) for name, values in arrays.items()}
    tensors |= {f"table.{k}": content for k, (_, content) in enumerate(packed)}
    return safetensors.numpy.save(tensors, {"kinds": json.dumps([kind for kind, _ in packed])})


def from_bytes(content: bytes) -> tuple[dict[str, np.ndarray], tuple[Any, ...]]:
    """Return the arrays and the tables that ``to_bytes`` has packed."""
    tensors = safetensors.numpy.load(content)
    size = int.from_bytes(content[:8], "little")
    kinds = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["kinds"])
    tables = tuple(_unpacked(kind, tensors.pop(f"table.{k}")) for k, kind in enumerate(kinds))
    return {name.removeprefix("array."): values for name, values in tensors.items()}, tables


def _packed(table: Any) -> tuple[str, np.ndarray]:
    """Return the kind of a table and its content as an array."""
    layout = layout_of(table)
    if layout is not None:
        return layout.backend + SERIES * layout.series, np.frombuffer(_arrow_stream(table), np.uint8)
    values = np.asarray(table)
    if values.dtype.kind in "biuf":
        return ARRAY, np.array(values)
    values = np.asarray(table, dtype=object)
    plain = lambda cell: cell.item() if isinstance(cell, np.generic) else str(cell)
    cells = json.dumps([values.shape, values.ravel().tolist()], default=plain)
    return CELLS, np.frombuffer(cells.encode(), np.uint8)


def _unpacked(kind: str, content: np.ndarray) -> Any:
    if kind == ARRAY:
        return content
    if kind == CELLS:
        shape, cells = json.loads(content.tobytes())
        values = np.empty(len(cells), object)
        values[:] = cells
        return values.reshape(shape)
    import pyarrow

    table = pyarrow.ipc.open_stream(content.tobytes()).read_all()
    frame = nw.from_arrow(table, backend=kind.removesuffix(SERIES))  # type: ignore[arg-type]
    return (frame[frame.columns[0]] if kind.endswith(SERIES) else frame).to_native()


def _arrow_stream(table: Any) -> bytes:
    import pyarrow

    wrapped = nw.from_native(table, eager_only=True, allow_series=True)
    if isinstance(wrapped, nw.Series):
        wrapped = wrapped.alias("" if wrapped.name is None else wrapped.name).to_frame()
    # A frame of pandas stores its types in the metadata.
    arrow = nw.maybe_reset_index(wrapped).to_arrow()
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, arrow.schema) as writer:
        writer.write_table(arrow)
    return sink.getvalue().to_pybytes()
