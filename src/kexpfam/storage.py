"""One safetensors file per object: arrays as tensors, everything else as JSON that a person can read in the header.

Loading runs no code from the file. A class is recorded by name and restored only if kexpfam defines it or it is in
``FOREIGN_CLASSES``; a function is recorded by its name in ``FUNCTIONS``. In the JSON, a key that starts with ``$`` says
what the object around it stands for; an object without one is a dictionary.
"""

import dataclasses
import enum
import hashlib
import importlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from kexpfam import processes
from kexpfam.files import written
from kexpfam.model import networks
from kexpfam.version import __version__

__all__ = ["Checkpoint", "StorageError", "load_tree", "save_tree"]

FORMAT, VERSION = "kexpfam", "2"
# The first bytes of the header that save_tree writes; by them a file that was cut short is told from a foreign one.
OPENING = json.dumps({"__metadata__": {"format": FORMAT}}, separators=(",", ":"))[:-2].encode()
HEADER_LENGTH_BYTES = 8
USE_THE_WRITER = "load the file with the version that wrote it"

# The modules that a class name in a file may lead to; __main__ is left out because importing it runs the program.
OWN_MODULE = re.compile(r"kexpfam(\.(?!__)\w+)*", re.ASCII)
FOREIGN_CLASSES: dict[str, type] = {"equinox.nn:MLP": eqx.nn.MLP, "equinox.nn:Linear": eqx.nn.Linear}
FUNCTIONS: dict[str, Callable] = {
    "silu": networks.silu,
    "relu": networks.relu,
    "jax.silu": jax.nn.silu,
    "jax.relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    # Equinox's identity is an anonymous function that is public only as the default of this argument.
    "equinox.identity": inspect.signature(eqx.nn.MLP.__init__).parameters["final_activation"].default,
}
DTYPES = (
    *("bool", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
# The types that JAX gives to Python numbers; only they can be restored as weak types.
WEAK_DTYPES = ("int32", "int64", "float32", "float64")


class StorageError(ValueError):
    """A file cannot be read or written; the message says what to do."""


def save_tree(path: str | os.PathLike, kind: str, tree: Any, metadata: dict[str, Any]) -> None:
    """Write ``tree`` to one file, whole or not at all; ``kind`` and ``metadata`` say what it is.

    A value that could not be restored raises a TypeError that names its place, before anything is written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise StorageError(f"the folder {path.parent} does not exist; create it first")
    tensors = _Tensors()
    header = {
        "format": FORMAT,
        "version": VERSION,
        "kexpfam": __version__,
        "kind": kind,
        "metadata": _json(_encode(metadata, "metadata", tensors)),
        "structure": _json(_encode(tree, "tree", tensors)),
    }
    with written(path) as file:
        file.writelines(_file_parts(header, tensors))


def load_tree(path: str | os.PathLike) -> tuple[str, Any, dict[str, Any]]:
    """Return the kind, the tree and the metadata that were saved, float64 arrays included in any precision mode."""
    path = Path(path)
    header, tensors = _read(path)
    try:
        tree = _decode(json.loads(header["structure"]), tensors)
        return header["kind"], tree, _decode(json.loads(header["metadata"]), tensors)
    except StorageError as problem:
        writer = header.get("kexpfam", "unknown")
        raise StorageError(f"{path} (written by kexpfam {writer}): {problem}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
        raise StorageError(f"{path} is damaged: its structure cannot be read; save it again") from problem


class Checkpoint:
    """A file that holds the state of an interrupted run of one task, and of no other.

    ``task`` is whatever the run depends on: data, settings and solver, which may be classes and functions of the user's own.
    """

    def __init__(self, path: str | os.PathLike, task: Any) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise StorageError(
                f"{path} is no file: a checkpoint is read again, so that it cannot be a folder, device or pipe"
            )
        tensors = _Tensors(restored=False)
        digest = hashlib.sha256(_json(_encode(task, "task", tensors)).encode())
        for tensor in tensors.values():
            digest.update(repr((tensor.dtype.name, tensor.shape)).encode() + tensor.tobytes())
        self._fingerprint = digest.hexdigest()

    def read(self, template: Any) -> Any:
        """Return the template with the stored arrays in it, or as it is if there is no file yet.

        Several processes all get what the first one has.
        """
        with processes.copied(self.path) as path:
            if path is None:
                return template
            kind, leaves, metadata = load_tree(path)
        arrays, rest = eqx.partition(template, eqx.is_array)
        expected, structure = jax.tree.flatten(arrays)
        same_task = kind == "checkpoint" and metadata.get("fingerprint") == self._fingerprint
        if not same_task or [leaf.shape for leaf in leaves] != [leaf.shape for leaf in expected]:
            raise StorageError(
                f"{self.path} belongs to a fit of other data, settings or solver; remove it or name another file"
            )
        return eqx.combine(jax.tree.unflatten(structure, leaves), rest)

    def write(self, state: Any) -> None:
        """Replace the file by the arrays of the state; of several processes only the first one does."""
        if processes.place().rank:
            return
        leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
        save_tree(self.path, "checkpoint", leaves, {"fingerprint": self._fingerprint})


class _Tensors(dict[str, np.ndarray]):
    """Arrays by name; ``nodes`` knows each by its identity, so that one that a tree holds twice is stored once.

    A tree that is only compared, and never ``restored``, may hold classes and functions from outside kexpfam.
    """

    def __init__(self, *, restored: bool = True) -> None:
        super().__init__()
        self.nodes: dict[int, dict[str, str]] = {}
        self.restored = restored


def _encode(value: Any, place: str, tensors: _Tensors) -> Any:
    """Return the JSON node of a value; its arrays are added to ``tensors``, named by their place in the tree."""
    # Exact types, because a subclass (an ordered dictionary, a masked array) would come back as something else.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) in (list, tuple):
        nodes = [_encode(item, f"{place}.{index}", tensors) for index, item in enumerate(value)]
        return nodes if type(value) is list else {"$tuple": nodes}
    if type(value) is dict:
        return _encode_dict(value, place, tensors)
    if type(value) is np.ndarray or isinstance(value, np.generic | jax.Array):
        return _encode_array(value, place, tensors)
    if isinstance(value, enum.Enum):
        return {"$enum": _class_name_for(value, place, tensors), "member": value.name}
    if _is_record(type(value)):
        node = {"$class": _class_name_for(value, place, tensors)}
        names = _field_names(type(value))
        return node | {name: _encode(getattr(value, name), f"{place}.{name}", tensors) for name in names}
    if callable(value):
        return {"$function": _function_name(value, place, tensors)}
    raise TypeError(
        f"{place}: cannot store a {type(value).__name__}; use arrays, numbers, strings, lists or dicts"
    )


def _encode_dict(value: dict, place: str, tensors: _Tensors) -> dict[str, Any]:
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(f"{place}: cannot store the key {key!r}; keys must be strings or integers")
    nodes = {key: _encode(item, f"{place}.{key}", tensors) for key, item in value.items()}
    if int in map(type, nodes):
        return {"$items": [[key, node] for key, node in nodes.items()]}
    return {"$dict": nodes} if any(key.startswith("$") for key in value) else nodes


def _encode_array(value: Any, place: str, tensors: _Tensors) -> dict[str, str]:
    if id(value) in tensors.nodes:
        return tensors.nodes[id(value)]
    if value.dtype.name not in DTYPES:
        raise TypeError(
            f"{place}: cannot store an array of {value.dtype.name}; convert it to one of {', '.join(DTYPES)}"
        )
    name = place
    while name in tensors:  # {"a.b": x} and {"a": {"b": y}} lead to the same place
        name += "'"
    # safetensors copies memory as it lies, so a transposed or byte-swapped array must be laid out anew.
    tensors[name] = np.array(value, dtype=np.dtype(value.dtype).newbyteorder("="), order="C")
    tensors.nodes[id(value)] = {_array_tag(value): name}
    return tensors.nodes[id(value)]


def _array_tag(value: np.ndarray | np.generic | jax.Array) -> str:
    if isinstance(value, jax.Array):
        return "$weak_jax" if value.weak_type and value.dtype.name in WEAK_DTYPES else "$jax"
    return "$numpy" if isinstance(value, np.ndarray) else "$scalar"


def _function_name(function: Callable, place: str, tensors: _Tensors) -> str:
    # Only the very same object: what wraps a known function (jax.grad of it, say) is another function.
    for name, known in FUNCTIONS.items():
        if known is function:
            return name
    # A lambda, or a function made by another, shares its name with others.
    if not tensors.restored and "<" not in getattr(function, "__qualname__", "<"):
        return f"{function.__module__}:{function.__qualname__}"
    raise TypeError(
        f"{place}: cannot store the function {function!r}; use one of {', '.join(sorted(FUNCTIONS))}"
    )


def _decode(node: Any, tensors: dict[str, Any]) -> Any:
    """Return the value that a JSON node stands for."""
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), None)
    return _decode_dict(node, tensors) if tag is None else DECODERS[tag](node, tensors)


def _decode_dict(nodes: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: _decode(item, tensors) for key, item in nodes.items()}


def _decode_record(node: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """Return a module or named tuple with the stored fields; its ``__init__`` is not called."""
    cls = _class_named(node["$class"], _is_record)
    names = _field_names(cls)
    if set(names) != set(node) - {"$class"}:
        raise StorageError(f"{node['$class']} has other fields in this kexpfam; {USE_THE_WRITER}")
    values = {name: _decode(node[name], tensors) for name in names}
    if issubclass(cls, tuple):
        return tuple.__new__(cls, values.values())
    record = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(record, name, value)
    return record


def _jax_tensor(name: str, tensors: dict[str, Any], convert: Callable[[np.ndarray], jax.Array]) -> jax.Array:
    """Return the tensor as a JAX array, and the same one each time it is asked for."""
    if not isinstance(tensors[name], jax.Array):
        tensors[name] = convert(tensors[name])
    return tensors[name]


def _to_jax(values: np.ndarray) -> jax.Array:
    with jax.enable_x64(True):
        return jnp.array(values)


def _to_weak_jax(values: np.ndarray) -> jax.Array:
    """Return a weakly typed array, which takes the type of its partner: as a strong one it would change results."""
    # Only Python numbers make weak types, in the precision of the moment; overwriting their values keeps the type.
    with jax.enable_x64(values.dtype.itemsize == 8):
        zeros = jnp.broadcast_to(jnp.asarray(values.dtype.type(0).item()), values.shape)
        return zeros.at[...].set(values)


DECODERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "$float": lambda node, tensors: float(node["$float"]),
    "$tuple": lambda node, tensors: tuple(_decode(item, tensors) for item in node["$tuple"]),
    "$dict": lambda node, tensors: _decode_dict(node["$dict"], tensors),
    "$items": lambda node, tensors: {key: _decode(item, tensors) for key, item in node["$items"]},
    "$numpy": lambda node, tensors: tensors[node["$numpy"]],
    "$scalar": lambda node, tensors: tensors[node["$scalar"]][()],
    "$jax": lambda node, tensors: _jax_tensor(node["$jax"], tensors, _to_jax),
    "$weak_jax": lambda node, tensors: _jax_tensor(node["$weak_jax"], tensors, _to_weak_jax),
    "$function": lambda node, tensors: FUNCTIONS[node["$function"]],
    "$enum": lambda node, tensors: _class_named(node["$enum"], _is_enum)[node["member"]],
    "$class": _decode_record,
}


def _is_record(cls: Any) -> bool:
    if not isinstance(cls, type):
        return False
    return issubclass(cls, eqx.Module) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def _is_enum(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, enum.Enum)


def _field_names(cls: Any) -> tuple[str, ...]:
    return cls._fields if issubclass(cls, tuple) else tuple(field.name for field in dataclasses.fields(cls))


def _class_name(cls: type) -> str:
    foreign = (name for name, known in FOREIGN_CLASSES.items() if known is cls)
    return next(foreign, f"{cls.__module__}:{cls.__qualname__}")


def _class_name_for(value: Any, place: str, tensors: _Tensors) -> str:
    """Return the name of the value's class; if it is to be restored, once it is sure that the name leads back to the class."""
    name = _class_name(type(value))
    if not tensors.restored:
        return name
    try:
        found = _class_named(name, _is_enum if isinstance(value, enum.Enum) else _is_record)
    except StorageError:
        found = None
    if found is not type(value):
        known = ", ".join(FOREIGN_CLASSES)
        raise TypeError(
            f"{place}: cannot store a {name}; only classes of kexpfam and {known} can be restored"
        )
    return name


def _class_named(name: str, is_expected: Callable[[Any], bool]) -> Any:
    """Return the class of that name; modules outside kexpfam are never imported."""
    if name in FOREIGN_CLASSES:
        found: Any = FOREIGN_CLASSES[name]
    else:
        module, _, qualified = name.partition(":")
        found = _attribute(module, qualified) if OWN_MODULE.fullmatch(module) else None
    # Comparing the names keeps out what a module of kexpfam has merely imported.
    if not is_expected(found) or _class_name(found) != name:
        raise StorageError(
            f"{name!r} is not a class that a kexpfam file may hold; load only files that you trust"
        )
    return found


def _attribute(module: str, qualified: str) -> Any:
    try:
        found = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise StorageError(f"{module}:{qualified} is not in this kexpfam; {USE_THE_WRITER}") from None
    return found


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the checked header and the tensors of a file."""
    if not path.is_file():
        raise StorageError(f"there is no file {path}; check the path")
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            _check_header(header, path)
            names = file.keys()
            return header, {name: file.get_tensor(name) for name in names}
    except SafetensorError:
        raise StorageError(_why_unreadable(path)) from None


def _check_header(header: dict[str, str], path: Path) -> None:
    if header.get("format") != FORMAT:
        raise StorageError(
            f"{path} is a safetensors file, but not one of kexpfam; pass a file that kexpfam saved"
        )
    version, writer = header.get("version", ""), header.get("kexpfam", "of unknown version")
    if version == VERSION:
        return
    if version.isdecimal() and int(version) < int(VERSION):
        raise StorageError(
            f"{path} has format {version}, of kexpfam {writer}; {USE_THE_WRITER}, or fit the model again"
        )
    if version.isdecimal():
        raise StorageError(
            f"{path} has format {version}, of kexpfam {writer}, which is newer than this one; upgrade kexpfam"
        )
    raise StorageError(
        f"{path} has no format number that kexpfam knows ({version!r}); it is damaged, or not a kexpfam file"
    )


def _why_unreadable(path: Path) -> str:
    with open(path, "rb") as file:
        opening = file.read(HEADER_LENGTH_BYTES + len(OPENING))[HEADER_LENGTH_BYTES:]
    if OPENING.startswith(opening):
        return f"{path} is cut short or damaged; copy it again from its source, or save it again"
    return f"{path} is not a kexpfam file; pass a file that kexpfam saved"


def _file_parts(header: dict[str, str], tensors: dict[str, np.ndarray]) -> Sequence[bytes | memoryview]:
    """Return the parts of a safetensors file with a header in our order; the library's changes with each call."""
    content = safetensors.numpy.save(tensors, metadata=header)
    end = HEADER_LENGTH_BYTES + int.from_bytes(content[:HEADER_LENGTH_BYTES], "little")
    entries = json.loads(content[HEADER_LENGTH_BYTES:end])
    del entries["__metadata__"]
    ordered = _json({"__metadata__": header} | entries).encode()
    ordered += b" " * (-len(ordered) % 8)  # tensors start at a multiple of 8 bytes
    return len(ordered).to_bytes(HEADER_LENGTH_BYTES, "little"), ordered, memoryview(content)[end:]


def _json(node: Any) -> str:
    return json.dumps(node, separators=(",", ":"), allow_nan=False)
