"""Check types and shapes of kexpfam's annotations in every test run, at no cost to users."""

from collections.abc import Callable
from typing import Any, Self, get_args

import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype
from numpy.typing import ArrayLike

# An int is good enough where a float is wanted, as in PEP 484. Functions are checked one by one, outside
# their class.
_strictly = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({Self: object})))


def checked(function: Callable) -> Callable:
    """Return the function with checked types; functions with user input only on return.

    scikit-learn's contract is that a constructor takes anything, and that methods say in words what is wrong
    with their data.
    """
    if any(map(_from_users, function.__annotations__.values())):
        function.__annotations__ = {"return": function.__annotations__.get("return", Any)}
    return _strictly(function)


def _from_users(hint: Any) -> bool:
    parts = get_args(hint)
    return np.random.RandomState in parts or all(part in parts for part in get_args(ArrayLike))
