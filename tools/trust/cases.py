"""Random tables and calls: a result without NaN, or one clear exception."""

import inspect
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily, Learned
from kexpfam.estimators import ConditionalKernelDensity, GaussianMixtureDensity, KernelDensity
from tools.trust.outcomes import Golden, Outcome, golden

__all__ = ["CHECKS"]

# Exceptions that a wrong argument may raise; AttributeError is scikit-learn's for what was not fitted,
# and a string may be the path of a table.
CLEAR = (ValueError, TypeError, AttributeError, FileNotFoundError)
LONGEST_LINE = 400
# Seconds of the processor that a case may take.
SECONDS = 60.0
# One case in so many is a fit, the others are calls of golden models.
CALLS_PER_FIT = 20
TINY = Learned(folds=2, repeats=1, width=4, epochs=2, steps=4, bumps=2, most_bumps=2, cells=8)
FIXED = {"lengthscale": 1.0, "rkhs_penalty": 0.1, "n_centres": 6}
ESTIMATORS: tuple[Callable[[], Any], ...] = (
    KernelDensity,
    GaussianMixtureDensity,
    lambda: KernelExpFamily(model="mixture"),
    lambda: KernelExpFamily(model="kernel", kernel=Kernel(**FIXED)),
    lambda: KernelExpFamily(model="chain", learned=TINY),
    ConditionalKernelDensity,
    lambda: ConditionalKernelExpFamily(model="chain", learned=TINY),
)
SCALES = (1.0, 1e-3, 1e6, 1e-200, 1e200)
ODD_CELLS = (np.nan, np.inf, -np.inf, 0.0, 1e308, -1e308, 5e-324, 2**63)
ODD_ARGUMENTS = (
    *(0, 1, -1, 2.5, True, None, np.nan, np.inf, "a", b"a", (), [], {}, [0.5], (0.1, 0.9), object(), 10**30),
    *(np.zeros((0, 1)), np.zeros((2, 2, 2)), [[1.0], [2.0, 3.0]], {0: 1.0}, {"a": 1.0}, np.ones(3, complex)),
)


def table(rng: np.random.Generator, width: int, rows: int | None = None) -> Any:
    """Return a random table: of numbers, labels or dates, in an array, a list or a frame."""
    rows = int(rng.integers(0, 30)) if rows is None else rows
    width = width if rng.random() < 0.8 else int(rng.integers(0, 5))
    cells = rng.normal(size=(rows, width)) * rng.choice(SCALES, p=(0.7, 0.1, 0.1, 0.05, 0.05))
    if rng.random() < 0.2:
        cells = np.round(cells)
    if rng.random() < 0.3 and cells.size:
        cells.flat[rng.integers(cells.size)] = rng.choice(ODD_CELLS)
    if rng.random() < 0.1:
        cells = np.repeat(cells[:1], rows, axis=0)
    return _contained(rng, cells)


def _contained(rng: np.random.Generator, cells: np.ndarray) -> Any:
    import pandas as pd
    import pyarrow as pa

    names = [f"x{j}" for j in range(cells.shape[1])]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        makers: tuple[Callable[[], Any], ...] = (
            lambda: cells,
            lambda: cells.astype(np.float32),
            lambda: np.asfortranarray(cells),
            lambda: cells.tolist(),
            lambda: cells[:, 0] if cells.shape[1] else cells,
            lambda: pd.DataFrame(cells, columns=names),
            lambda: pd.DataFrame(cells).astype(object),
            lambda: pd.DataFrame(np.where(cells > 0.0, "a", "b"), columns=names),
            lambda: pa.table(dict(zip(names, cells.T, strict=True))),
            lambda: cells > 0.0,
            lambda: np.ma.masked_greater(cells, 1.0),
            lambda: np.nan_to_num(cells).clip(-1e9, 1e9).astype("datetime64[s]"),
            lambda: cells.astype(object),
            lambda: cells.astype(str),
        )
        weights = np.array([6, 1, 1, 2, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1], float)
        return makers[rng.choice(len(makers), p=weights / weights.sum())]()


def calls(model: Any) -> dict[str, Callable]:
    """Return the public methods of a model that compute something."""
    left = ("fit", "get_params", "set_params", "plot", "report", "save", "export", "set_output")
    left += ("diagnose", "log_prob")
    left += ("get_metadata_routing", "set_fit_request", "set_score_request", "calibrate", "conditionals")
    found = {}
    for name in dir(type(model)):
        if not name.startswith("_") and name not in left and inspect.isfunction(getattr(type(model), name)):
            found[name] = getattr(model, name)
    return found


def arguments(rng: np.random.Generator, call: Callable, model: Any) -> dict[str, Any]:
    """Return random arguments of a public method."""
    width, rows, found = model.n_features_in_, int(rng.integers(0, 20)), {}
    sensible: dict[str, Callable[[], Any]] = {
        "X": lambda: table(rng, width, rows),
        "y": lambda: table(rng, 1, rows),
        "x": lambda: table(rng, width, 1),
        "n_samples": lambda: int(rng.integers(1, 20)),
        "levels": lambda: rng.uniform(size=3),
        "known": lambda: {int(rng.integers(width)): float(rng.normal())},
        "columns": lambda: [int(rng.integers(width))],
        "random_state": lambda: int(rng.integers(2**31)),
    }
    for name, parameter in inspect.signature(call).parameters.items():
        needed = parameter.default is inspect.Parameter.empty or name in ("y", "n_samples")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if rng.random() < 0.1:
            found[name] = ODD_ARGUMENTS[rng.integers(len(ODD_ARGUMENTS))]
        elif name in sensible and (needed or rng.random() < 0.2):
            found[name] = sensible[name]()
    return found


def _numbers(result: Any) -> np.ndarray:
    """Return the numbers of a result, or none if it has none."""
    try:
        return np.asarray(result, float)
    except (TypeError, ValueError):
        return np.zeros(0)


def _has_gaps(given: Any) -> bool:
    return any(np.isnan(_numbers(part)).any() or isinstance(part, np.ma.MaskedArray) for part in given)


def problem_of(call: Callable[[], Any], given: dict[str, Any]) -> tuple[str, str]:
    """Return how a call ended ("result" or "refused"), and what is wrong with that, if anything."""
    start = time.process_time()  # the clock would count other programs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call()
        except CLEAR as error:
            text = str(error)
            wrong = "" if text.strip() and len(text) < LONGEST_LINE * 4 else f"unclear: {text[:200]!r}"
            return "refused", wrong
        except Exception as error:
            return "refused", f"{type(error).__name__}: {error}"
    seconds = time.process_time() - start
    if seconds > SECONDS:
        return "result", f"{seconds:.0f} s"
    gaps = np.isnan(_numbers(result)).any() and not _has_gaps(given.values())
    return "result", "NaN" if gaps else ""


def random_calls(trials: int, seed: int, folder: Path) -> Outcome:
    """Call public methods of golden models and fit cheap estimators with random arguments."""
    del folder
    models, failures, refused = list(golden()), [], 0
    for trial in range(trials):
        rng = np.random.default_rng([seed, trial])
        name, call, given = _fit(rng) if trial % CALLS_PER_FIT == 0 else _call(rng, models)
        ended, wrong = problem_of(lambda call=call, given=given: call(**given), given)
        refused += ended == "refused"
        failures += [f"trial {trial}, {name}: {wrong}"] if wrong else []
    return Outcome(trials, failures, f"{trials - refused} results without NaN, {refused} clear refusals")


def _fit(rng: np.random.Generator) -> tuple[str, Callable, dict[str, Any]]:
    estimator = ESTIMATORS[rng.integers(len(ESTIMATORS))]().set_params(random_state=0)
    rows, width = int(rng.integers(5, 40)), int(rng.integers(1, 4))
    given = {"X": table(rng, width, rows)}
    if estimator.conditional:
        given["y"] = table(rng, 1, rows)
    return f"{estimator}.fit", lambda **given: estimator.fit(**given) and 0.0, given


def _call(rng: np.random.Generator, models: list[Golden]) -> tuple[str, Callable, dict[str, Any]]:
    one = models[rng.integers(len(models))]
    methods = calls(one.model)
    name = list(methods)[rng.integers(len(methods))]
    return f"{one.name}.{name}", methods[name], arguments(rng, methods[name], one.model)


CHECKS = {"random_calls": random_calls}
