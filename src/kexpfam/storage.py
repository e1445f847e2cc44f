"""One safetensors file per object: arrays as tensors, everything else as JSON in the header.

A node of the JSON is a plain value, a list, a dictionary, or an object with a key that starts with ``$`` and
names its type (see ``DECODERS``). Loading executes no code from the file: only records and enumerations of
kexpfam, those in ``FOREIGN_CLASSES`` and the functions in ``FUNCTIONS`` are restored, without constructors.

Files of format ``OLDEST_FORMAT`` and later stay readable:

- A class is stored as ``module:Name``. The module is a hint: a class that has moved is found by its name. A
  class that was renamed needs an entry in ``RENAMED``.
- A field that the file does not have takes its default. A stored field that the class does not have is an
  error, unless ``RENAMED`` names its successor or drops it.
- A checksum over the header and all arrays is verified before anything is restored.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
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
from kexpfam.jax_settings import double_precision, single_precision
from kexpfam.model import networks
from kexpfam.stacklevel import caller_level
from kexpfam.version import __version__

# Raise FORMAT whenever a reader of the former format would misread a new file; see tools/golden.py.
FORMAT = 3
OLDEST_FORMAT = 3
# Former names. "Old": "New" for classes and estimators, "module:Old": "module:New" for a class whose name
# is not unique, "Class.old": "new" for fields; None drops a field.
RENAMED: dict[str, str | None] = {"Columns": "TableSchema", "Boosting.depth": None} | {
    name: None
    for name in (
        *("Learned.polish", "Learned.polish_progress", "Learned.polish_steps", "Learned.polished_rows"),
        *("Integration.resampling_share", "Integration.candidates_per_draw"),
        "Integration.candidates_per_condition",
    )
}

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

# Modules that a stored class may name; __main__ is excluded because importing it runs the program.
OWN_MODULE = re.compile(r"kexpfam(\.(?!__)\w+)*", re.ASCII)
LENGTH_BYTES = 8
# The first bytes of the header that save_tree writes; they distinguish a truncated file from a foreign one.
OPENING = b'{"__metadata__":{"format":"kexpfam"'
USE_THE_WRITER = "load the file with the version that wrote it"


class StorageError(ValueError):
    """Raised if a file cannot be read or written."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written, for instance because the disk is full."""


def save_tree(path: str | os.PathLike, kind: str, tree: Any, metadata: dict[str, Any]) -> None:
    """Write ``tree`` to one file, completely or not at all; ``kind`` and ``metadata`` describe it.

    A value that cannot be stored raises a TypeError that names its place, before anything is written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise StorageError(f"the folder {path.parent} does not exist; create it first")
    tensors = _Tensors()
    header = {
        "format": "kexpfam",
        "version": str(FORMAT),
        "kexpfam": __version__,
        "kind": kind,
        "metadata": _json(_encode(metadata, "metadata", tensors)),
        "structure": _json(_encode(tree, "tree", tensors)),
    }
    header["checksum"] = _checksum(header, tensors)
    with written(path) as file:
        file.writelines(_file_parts(header, tensors))


def load_tree(path: str | os.PathLike) -> tuple[str, Any, dict[str, Any]]:
    """Return the kind, the tree and the metadata of a file; raise StorageError if it is damaged.

    Arrays have the type that they were saved with, in any precision mode of JAX.
    """
    path = Path(path)
    try:
        header, tensors = _read(path)
        try:
            tree = _decode(json.loads(header["structure"]), tensors)
            return header["kind"], tree, _decode(json.loads(header["metadata"]), tensors)
        except StorageError as problem:
            writer = header.get("kexpfam", "unknown")
            raise StorageError(f"{path} (written by kexpfam {writer}): {problem}") from None
    except StorageError:
        raise
    except OSError as problem:
        raise StorageError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except Exception as problem:
        raise StorageError(f"{path} is damaged: its structure cannot be read; save it again") from problem


def restored_fields(
    owner: str, stored: dict[str, Any], names: Iterable[str], default: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the value of each field in ``names``: the stored one, or its default if there is none.

    ``default`` raises KeyError for a field without a default. Stored fields are renamed or dropped by
    ``RENAMED``; other unknown fields, unless they are None, raise a StorageError, because ignoring them could
    change results.
    """
    renamed = {name: RENAMED.get(f"{owner}.{name}", name) for name in stored}
    current = {new: stored[old] for old, new in renamed.items() if new is not None}
    if unknown := sorted(name for name in set(current) - set(names) if current[name] is not None):
        raise StorageError(f"{owner} has no field {unknown[0]} in this kexpfam; {USE_THE_WRITER}")
    try:
        return {name: current[name] if name in current else default(name) for name in names}
    except KeyError as missing:
        raise StorageError(f"{owner} needs a field {missing} that the file lacks; {USE_THE_WRITER}") from None


class Checkpoint:
    """A file with the state of an interrupted run of one task.

    ``task`` contains everything that the run depends on: data, settings and solver, which may be classes and
    functions of the user. A checkpoint of another task is refused.
    """

    def __init__(self, path: str | os.PathLike, task: Any) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise StorageError(f"{path} is not a file; name a regular file for the checkpoint")
        tensors = _Tensors(restored=False)
        self._fingerprint = _checksum({"task": _json(_encode(task, "task", tensors))}, tensors)

    def read(self, template: Any) -> tuple[Any, dict[str, np.ndarray]]:
        """Return the template with the stored arrays, or unchanged if there is no file yet, and the trace.

        With several processes, all of them read the file of the first one.
        """
        with processes.first_process_file(self.path) as path:
            if path is None:
                return template, {}
            kind, leaves, metadata = load_tree(path)
        arrays, rest = eqx.partition(template, eqx.is_array)
        expected, structure = jax.tree.flatten(arrays)
        same_task = kind == "checkpoint" and metadata.get("fingerprint") == self._fingerprint
        if not same_task or [leaf.shape for leaf in leaves] != [leaf.shape for leaf in expected]:
            wrong = f"{self.path} belongs to a fit of other data, settings or solver"
            raise StorageError(f"{wrong}; remove it or name another")
        return eqx.combine(jax.tree.unflatten(structure, leaves), rest), metadata.get("trace", {})

    def write(self, state: Any, trace: dict[str, np.ndarray] | None = None) -> None:
        """Replace the file by the arrays of the state and the trace of the steps so far.

        Only the first of several processes writes. A file that cannot be written raises a warning, not an
        error.
        """
        if processes.place().rank:
            return
        leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
        try:
            content = {"fingerprint": self._fingerprint, "trace": trace or {}}
            save_tree(self.path, "checkpoint", leaves, content)
        except OSError as problem:
            reason = f"the checkpoint {self.path} is not written: {problem.strerror or problem}"
            message = f"{reason}. The fit continues; if it is interrupted, it resumes from an earlier state."
            warnings.warn(message, CheckpointWarning, stacklevel=caller_level())


class _Tensors(dict[str, np.ndarray]):
    """Arrays by name; ``nodes`` maps identities to JSON nodes, so that a shared array is stored once.

    A tree that is only compared (not ``restored``) may contain classes and functions from outside kexpfam.
    """

    def __init__(self, *, restored: bool = True) -> None:
        super().__init__()
        self.nodes: dict[int, dict[str, str]] = {}
        self.restored = restored


def _encode(value: Any, place: str, tensors: _Tensors) -> Any:
    """Return the JSON node of a value; add its arrays to ``tensors``, named by their place in the tree."""
    # Exact types: a subclass (an ordered dictionary, a masked array) would be restored as its base class.
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
        return {"$enum": _stored_name(value, place, tensors), "member": value.name}
    if _is_record(type(value)):
        node = {"$class": _stored_name(value, place, tensors)}
        names = _field_names(type(value))
        return node | {name: _encode(getattr(value, name), f"{place}.{name}", tensors) for name in names}
    if callable(value):
        return {"$function": _function_name(value, place, tensors)}
    name = type(value).__name__
    raise TypeError(f"{place}: cannot store a {name}; use arrays, numbers, strings, lists or dicts")


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
        known = ", ".join(DTYPES)
        raise TypeError(f"{place}: cannot store an array of {value.dtype.name}; convert it to one of {known}")
    name = place
    while name in tensors:  # {"a.b": x} and {"a": {"b": y}} have the same place
        name += "'"
    # safetensors writes the memory of an array, so it must be contiguous and in native byte order.
    tensors[name] = np.array(value, dtype=np.dtype(value.dtype).newbyteorder("="), order="C")
    tag = "$numpy" if isinstance(value, np.ndarray) else "$scalar"
    if isinstance(value, jax.Array):
        tag = "$weak_jax" if value.weak_type and value.dtype.name in WEAK_DTYPES else "$jax"
    tensors.nodes[id(value)] = {tag: name}
    return tensors.nodes[id(value)]


def _function_name(function: Callable, place: str, tensors: _Tensors) -> str:
    # By identity: a wrapped function, such as jax.grad of a known one, is another function.
    for name, known in FUNCTIONS.items():
        if known is function:
            return name
    # Lambdas and local functions have no unique name.
    if not tensors.restored and "<" not in getattr(function, "__qualname__", "<"):
        return f"{function.__module__}:{function.__qualname__}"
    names = ", ".join(sorted(FUNCTIONS))
    raise TypeError(f"{place}: cannot store the function {function!r}; use one of {names}")


def _stored_name(value: Any, place: str, tensors: _Tensors) -> str:
    """Return the name of the value's class; raise a TypeError if the class cannot be found by it."""
    cls = type(value)
    foreign = (name for name, known in FOREIGN_CLASSES.items() if known is cls)
    name = next(foreign, f"{cls.__module__}:{cls.__qualname__}")
    if tensors.restored and _find_class(name) is not cls:
        known = ", ".join(FOREIGN_CLASSES)
        raise TypeError(f"{place}: cannot store a {name}; only classes of kexpfam and {known} are restored")
    return name


def _decode(node: Any, tensors: dict[str, Any]) -> Any:
    """Return the value of a JSON node."""
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
    cls = _class_named(node["$class"])
    stored = _decode_dict({name: item for name, item in node.items() if name != "$class"}, tensors)
    values = restored_fields(cls.__name__, stored, _field_names(cls), functools.partial(_default, cls))
    if issubclass(cls, tuple):
        return tuple.__new__(cls, values.values())
    record = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(record, name, value)
    return record


def _jax_tensor(name: str, tensors: dict[str, Any], *, weak: bool = False) -> jax.Array:
    """Return the tensor as a JAX array, the same object each time.

    A strong type instead of a weak one would change the types of results.
    """
    values = tensors[name]
    if not isinstance(values, jax.Array):
        with single_precision() if weak and values.dtype.itemsize < 8 else double_precision():
            tensors[name] = jnp.array(values)
            if weak:
                # Only Python numbers make weak types, in this precision; setting values keeps the type.
                zeros = jnp.broadcast_to(jnp.asarray(values.dtype.type(0).item()), values.shape)
                tensors[name] = zeros.at[...].set(values)
    return tensors[name]


DECODERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "$float": lambda node, tensors: float(node["$float"]),
    "$tuple": lambda node, tensors: tuple(_decode(item, tensors) for item in node["$tuple"]),
    "$dict": lambda node, tensors: _decode_dict(node["$dict"], tensors),
    "$items": lambda node, tensors: {key: _decode(item, tensors) for key, item in node["$items"]},
    "$numpy": lambda node, tensors: tensors[node["$numpy"]],
    "$scalar": lambda node, tensors: tensors[node["$scalar"]][()],
    "$jax": lambda node, tensors: _jax_tensor(node["$jax"], tensors),
    "$weak_jax": lambda node, tensors: _jax_tensor(node["$weak_jax"], tensors, weak=True),
    "$function": lambda node, tensors: FUNCTIONS[node["$function"]],
    "$enum": lambda node, tensors: _class_named(node["$enum"], is_enum=True)[node["member"]],
    "$class": _decode_record,
}


def _is_record(cls: Any) -> bool:
    if not isinstance(cls, type):
        return False
    return issubclass(cls, eqx.Module) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def _field_names(cls: Any) -> tuple[str, ...]:
    return cls._fields if issubclass(cls, tuple) else tuple(field.name for field in dataclasses.fields(cls))


def _default(cls: Any, name: str) -> Any:
    """Return the default of a field of a module or named tuple; raise KeyError if it has none."""
    if issubclass(cls, tuple):
        return cls._field_defaults[name]
    field = cls.__dataclass_fields__[name]
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        raise KeyError(name)
    return field.metadata.get("converter", lambda default: default)(value)


def _class_named(name: str, *, is_enum: bool = False) -> Any:
    """Return the class of that name; modules outside kexpfam are never imported."""
    found = _find_class(name)
    if not (isinstance(found, enum.EnumType) if is_enum else _is_record(found)):
        raise StorageError(f"{name!r} is not a class that this kexpfam can restore; {USE_THE_WRITER}")
    return found


def _find_class(name: str) -> Any:
    """Return the object that a stored class name refers to, or None if it is not in kexpfam."""
    if name in FOREIGN_CLASSES:
        return FOREIGN_CLASSES[name]
    module, _, stored = (RENAMED.get(name) or name).partition(":")
    current = RENAMED.get(stored, stored)
    if not OWN_MODULE.fullmatch(module) or current is None or not current.isidentifier():
        return None
    if (found := _own_attribute(module, current)) is not None:
        return found
    modules = _modules_defining(current)
    return _own_attribute(modules[0], current) if len(modules) == 1 else None


def _own_attribute(module: str, name: str) -> Any:
    """Return an attribute of a module, or None if it does not exist or is not defined in kexpfam."""
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    return found if OWN_MODULE.fullmatch(str(getattr(found, "__module__", None))) else None


@functools.cache
def _modules_defining(name: str) -> list[str]:
    """Return the modules of kexpfam whose source defines a class of that name; nothing is imported."""
    package = Path(__file__).parent
    definition = re.compile(rf"^class {name}\b", re.MULTILINE)
    paths = [path for path in sorted(package.rglob("*.py")) if definition.search(path.read_text("utf-8"))]
    names = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in paths]
    return [module for module in names if OWN_MODULE.fullmatch(module)]


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the header and the tensors of a file, after checking its format and checksum."""
    if not path.is_file():
        raise StorageError(f"there is no file {path}; check the path")
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            _check_format(header, path)
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError:
        with open(path, "rb") as stream:
            opening = stream.read(LENGTH_BYTES + len(OPENING))[LENGTH_BYTES:]
        reason = "is not a kexpfam file; pass a file that kexpfam saved"
        if OPENING.startswith(opening):
            reason = "is cut short or damaged; copy it again from its source, or save it again"
        raise StorageError(f"{path} {reason}") from None
    if header.pop("checksum", None) != _checksum(header, tensors):
        raise StorageError(f"{path} is damaged: its checksum does not match; copy or save it again")
    return header, tensors


def _check_format(header: dict[str, str], path: Path) -> None:
    if header.get("format") != "kexpfam":
        raise StorageError(f"{path} is a safetensors file, but not one of kexpfam; pass one of kexpfam")
    version = header.get("version", "")
    if not re.fullmatch("[0-9]{1,9}", version):
        raise StorageError(f"{path} has no valid format number ({version!r}); it is damaged")
    found = f"{path} has format {version}, of kexpfam {header.get('kexpfam', 'of unknown version')}"
    if int(version) > FORMAT:
        raise StorageError(f"{found}, which is newer; upgrade kexpfam")
    if int(version) < OLDEST_FORMAT:
        raise StorageError(f"{found}; {USE_THE_WRITER}, or fit the model again")


def _checksum(header: dict[str, str], tensors: dict[str, np.ndarray]) -> str:
    """Return a digest of the header and of names, types, shapes and values of all tensors."""
    digest = hashlib.blake2b(_json(sorted(header.items())).encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        digest.update(_json([name, tensor.dtype.name, tensor.shape]).encode())
        digest.update(tensor.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _file_parts(header: dict[str, str], tensors: dict[str, np.ndarray]) -> Sequence[bytes | memoryview]:
    """Return the parts of a safetensors file; unlike the library's, its header has a fixed order."""
    content = safetensors.numpy.save(tensors, metadata=header)
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    entries = json.loads(content[LENGTH_BYTES:end])
    del entries["__metadata__"]
    ordered = _json({"__metadata__": header} | entries).encode()
    ordered += b" " * (-len(ordered) % 8)  # tensors start at a multiple of 8 bytes
    return len(ordered).to_bytes(LENGTH_BYTES, "little"), ordered, memoryview(content)[end:]


def _json(node: Any) -> str:
    return json.dumps(node, separators=(",", ":"), allow_nan=False)
