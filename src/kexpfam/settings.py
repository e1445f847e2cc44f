"""Records of settings: frozen, compared by value, with the parameter interface of scikit-learn."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import equinox as eqx
import jax
import numpy as np

# Characters of a value in a message.
MOST_SHOWN = 80


def at_least(least: float, default: Any, *, whole: bool = False, **options: Any) -> Any:
    """Return a field of a settings record: a number, or a tuple of numbers, of at least ``least``."""
    words = f"a whole number of at least {least}" if whole else f"at least {least}"
    fits = lambda value: value >= least and (not whole or isinstance(value, int | np.integer))
    return _bounded(default, words, fits, options)


def above(low: float, default: Any, **options: Any) -> Any:
    """Return a field of a settings record: a number, or a tuple of numbers, greater than ``low``."""
    return _bounded(default, f"greater than {low:g}", lambda value: value > low, options)


def between(low: float, high: float, default: Any, **options: Any) -> Any:
    """Return a field of a settings record: a number, or a tuple of numbers, strictly between two bounds."""
    return _bounded(default, f"between {low:g} and {high:g}", lambda value: low < value < high, options)


def _bounded(default: Any, words: str, test: Callable[[Any], bool], options: dict[str, Any]) -> Any:
    return eqx.field(default=default, metadata={"bound": (words, test)}, **options)


class SettingsRecord(eqx.Module):
    """Base class of settings records; it checks the bounds of its fields.

    A record is a frozen Equinox module: a pytree, usable as a static argument under ``jit``. Two records are
    equal if they have the same class and equal fields; arrays are compared by shape, type and content.

    ``get_params`` and ``set_params`` follow scikit-learn, so that ``clone`` copies a record and
    ``GridSearchCV`` reaches a field of it as ``search__folds``. Only ``set_params`` changes a record.
    """

    def __check_init__(self) -> None:
        for field in dataclasses.fields(self):
            words, test = field.metadata.get("bound", ("", None))
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if test is not None and not all(_is_number(number) and test(number) for number in numbers):
                raise ValueError(_bound_message(field.name, words, value))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the fields by name; with ``deep``, also those of nested records as ``record__field``."""
        params = {field.name: getattr(self, field.name) for field in _init_fields(self)}
        if deep:
            for name, value in list(params.items()):
                if hasattr(value, "get_params") and not isinstance(value, type):
                    params |= {f"{name}__{inner}": item for inner, item in value.get_params().items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Change fields in place and return the record; ``record__field`` changes a field of a nested record.

        The new values are checked before any of them is set. A nested record is replaced by a changed copy,
        because it may be the default of other records.
        """
        values = self.get_params(deep=False)
        nested: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in params.items():
            name, _, inner = key.partition("__")
            if name not in values:
                valid = f"Valid parameters are: {list(values)}."
                raise ValueError(f"Invalid parameter {name!r} for {type(self).__name__}. {valid}")
            if inner:
                nested[name][inner] = value
            else:
                values[name] = value
        for name, inner_params in nested.items():
            if not hasattr(values[name], "set_params"):
                owner = f"{name} of {type(self).__name__}"
                raise ValueError(f"{owner} is {values[name]!r}, which has no parameters.")
            values[name] = _copy(values[name]).set_params(**inner_params)
        changed = type(self)(**values)  # runs converters and checks
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, getattr(changed, field.name))
        return self

    def __repr__(self) -> str:
        """Return a constructor call with the fields that differ from their defaults."""
        values = [(field, getattr(self, field.name)) for field in _init_fields(self)]
        changed = (f"{field.name}={value!r}" for field, value in values if _differs(field, value))
        return f"{type(self).__name__}({', '.join(changed)})"

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        if type(self) is not type(other):
            return NotImplemented
        return _key(self) == _key(other)

    def __hash__(self) -> int:
        return hash(_key(self))


def copy_changed_records(holder: Any, params: Mapping[str, Any]) -> None:
    """Replace each record of ``holder`` that ``params`` changes (``record__field``) by a copy of its own.

    An estimator calls this before scikit-learn's ``set_params``, which changes nested objects in place: a
    record that is a default argument is shared by all estimators.
    """
    for name in {key.partition("__")[0] for key in params if "__" in key}:
        if isinstance(record := getattr(holder, name, None), SettingsRecord):
            setattr(holder, name, _copy(record))


def check_at_least(record: eqx.Module, least: float, *names: str) -> None:
    """Raise unless these fields of a record are numbers of at least ``least``."""
    for name in names:
        value = getattr(record, name)
        if not _is_number(value) or not value >= least:
            raise ValueError(_bound_message(name, f"at least {least}", value))


def check_positive(record: eqx.Module, *names: str) -> None:
    """Raise unless these fields of a record are non-empty sequences of positive numbers."""
    for name in names:
        values = getattr(record, name)
        several = isinstance(values, Sequence | np.ndarray) and len(values) > 0
        if not several or not all(_is_number(value) and value > 0.0 for value in values):
            raise ValueError(f"{name} must be positive numbers, one at least; got {shown(values)}.")


def one_of(name: str, value: Any, known: Collection[str]) -> None:
    """Raise unless the value is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unknown {name} {shown(value)}: choose one of {', '.join(known)}.")


def _bound_message(name: str, words: str, value: Any) -> str:
    """Return the message that a field is not a number within its bound."""
    several = isinstance(value, tuple) and all(map(_is_number, value))
    number = "" if several or _is_number(value) or "number" in words else "a number, "
    return f"{name} must be {number}{words}, got {shown(value)}."


def _is_number(value: Any) -> bool:
    """Return whether a value is one number: neither a text, nor a boolean, nor several numbers."""
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf"


def shown(value: Any) -> str:
    """Return a value for an error message: one line of at most ``MOST_SHOWN`` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def _init_fields(record: SettingsRecord) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(record) if field.init]


def _copy(record: Any) -> Any:
    return type(record)(**record.get_params(deep=False))


def _differs(field: dataclasses.Field, value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(_key(value) != _key(field.default_factory()))
    converted = field.metadata.get("converter", lambda default: default)
    return field.default is dataclasses.MISSING or bool(_key(value) != _key(converted(field.default)))


def _key(value: Any) -> Any:
    """Return a hashable object that is equal for equal values."""
    if isinstance(value, SettingsRecord):
        return type(value), tuple(_key(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return "array", array.shape, array.dtype.str, array.tobytes()
    if isinstance(value, list | tuple):
        return type(value), tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return "dict", tuple((name, _key(item)) for name, item in sorted(value.items()))
    return value
