"""Verdicts of ``diagnose`` against the loss on fresh rows, for default fits and for broken settings."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm
from sklearn.mixture import GaussianMixture

from kexpfam import ConditionalKernelExpFamily, Judgement, Kernel, KernelExpFamily, Learned
from kexpfam.datasets import rings, two_moons
from kexpfam.estimators import GaussianMixtureDensity, KernelDensity
from tools.trust.outcomes import Outcome

__all__ = ["CHECKS"]

# The largest loss (nats) of a good fit; a fit is fine up to half of it.
MOST_LOSS = 0.1
FRESH_ROWS = 2000
SIZES = (150, 300, 600)
BRIEF = Judgement(draws=1000, certifying_draws=2000, refine=0)
BRIEF_CHAIN = Learned(folds=2, repeats=1, epochs=1)

Rows = tuple[np.ndarray, ...]


def _bimodal(rng: np.random.Generator, rows: int) -> np.ndarray:
    side = rng.choice([-1.5, 1.5], size=(rows, 1))
    return side + rng.normal(scale=0.4, size=(rows, 1))


def _wave(rng: np.random.Generator, rows: int) -> Rows:
    x = rng.uniform(-2.0, 2.0, size=(rows, 1))
    return x, np.sin(2.0 * x[:, 0]) + (0.1 + 0.2 * np.abs(x[:, 0])) * rng.normal(size=rows)


def _branches(rng: np.random.Generator, rows: int) -> Rows:
    x = rng.uniform(-1.0, 1.0, size=(rows, 2))
    return x, rng.choice([-1.0, 1.0], size=rows) * (0.5 + x[:, 0]) + 0.2 * rng.normal(size=rows)


def _correlated(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.normal(size=(rows, 4)) @ (np.eye(4) + 0.5 * np.eye(4, k=1))


# Each returns rows: those of p(x) as one array, of p(y | x) as two.
SETS: dict[str, Callable[[np.random.Generator, int], Rows]] = {
    "two moons": lambda rng, rows: (two_moons().sample(rows, random_state=int(rng.integers(2**31))),),
    "rings": lambda rng, rows: (rings().sample(rows, random_state=int(rng.integers(2**31))),),
    "normal": lambda rng, rows: (rng.normal(size=(rows, 1)),),
    "bimodal": lambda rng, rows: (_bimodal(rng, rows),),
    "gamma": lambda rng, rows: (rng.gamma(2.0, size=(rows, 1)),),
    "t3": lambda rng, rows: (rng.standard_t(3, size=(rows, 2)),),
    "wave": _wave,
    "branches": _branches,
    "four normals": lambda rng, rows: (_correlated(rng, rows),),
}
# Sets whose default fit trains networks, and how often they are chosen.
SLOW, SLOW_EVERY = ("wave", "branches", "four normals"), 9
# The settings of a fit, and whether they are broken; under conditions the length scale is that of y.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "length scale 20": {"kernel": Kernel(lengthscale=20.0), "model": "kernel"},
    "penalty 10": {"kernel": Kernel(rkhs_penalty=10.0), "model": "kernel"},
    "overfitted f": {"kernel": Kernel(lengthscale=0.1, rkhs_penalty=1e-7), "model": "kernel"},
    "one epoch": {"model": "chain", "learned": BRIEF_CHAIN},
    "matern52": {"kernel": Kernel("matern52"), "model": "kernel"},
    "exact": {"solver": "exact", "model": "kernel"},
    "given settings": {"kernel": Kernel(lengthscale=0.7, rkhs_penalty=1e-3), "model": "kernel"},
}
# Default fits are every second trial: their share of poor verdicts is promised.
ORDER = [name for other in list(SETTINGS)[1:] for name in ("default", other)]


class Case(NamedTuple):
    """A set, the number of rows, settings, and what was found."""

    set: str
    rows: int
    settings: str
    verdict: str
    fits: str
    loss: float
    error: float

    def __str__(self) -> str:
        loss = f"{self.verdict}, loss {self.loss:.3f} ± {self.error:.2g}"
        return f"{self.set}, {self.rows} rows, {self.settings}: {loss}"


def _linear(train: Rows, test: Rows) -> np.ndarray:
    """Return the scores of a linear regression with normal residuals."""
    with_constant = lambda x: np.column_stack([np.ones(len(x)), x])
    slopes = np.linalg.lstsq(with_constant(train[0]), train[1])[0]
    residuals = [y - with_constant(x) @ slopes for x, y in (train, test)]
    return norm.logpdf(residuals[1], scale=residuals[0].std())


def _best_reference(train: Rows, test: Rows) -> np.ndarray:
    """Return the scores of fresh rows under the best plain density."""
    if len(train) == 2:
        return _linear(train, test)
    laws = GaussianMixture(1), GaussianMixtureDensity(random_state=0), KernelDensity()
    return max((one.fit(*train).score_samples(*test) for one in laws), key=np.mean)


def _case(seed: int, trial: int) -> Case:
    """Return one fit with its verdict and its loss."""
    rng = np.random.default_rng([seed, trial])
    slow = trial % SLOW_EVERY == SLOW_EVERY - 1
    name = str(rng.choice([one for one in SETS if (one in SLOW) == slow]))
    rows, chosen = int(rng.choice(SIZES)), ORDER[trial % len(ORDER)]
    train, test = (SETS[name](rng, count) for count in (rows, FRESH_ROWS))
    kind = KernelExpFamily if len(train) == 1 else ConditionalKernelExpFamily
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = kind(**SETTINGS[chosen], random_state=int(rng.integers(2**31))).fit(*train)
        except ValueError as refused:
            if "Use 'gaussian'" not in str(refused):
                raise
            return Case(name, rows, chosen, "refused", "refused", 0.0, 0.0)
        diagnosis = model.diagnose(settings=BRIEF)
        losses = _best_reference(train, test) - model.score_samples(*test)
    error = float(losses.std() / np.sqrt(FRESH_ROWS))
    return Case(name, rows, chosen, diagnosis.verdict, diagnosis.fits, float(losses.mean()), error)


def wrong(case: Case) -> str | None:
    """Return what is wrong with a verdict, or None; two standard errors of the fresh rows are allowed for."""
    if case.verdict == "good" and case.loss - 2.0 * case.error > MOST_LOSS:
        return f"good but worse than a plain density: {case}"
    if case.fits == "poor" and case.loss < 0.5 * MOST_LOSS:
        return f"poor but fine: {case}"
    return None


def verdicts(trials: int, seed: int, folder: Path) -> Outcome:
    """Fit, diagnose, and compare with the loss on fresh rows; poor defaults may be one in a hundred."""
    del folder
    return outcome([_case(seed, trial) for trial in range(trials)])


def outcome(cases: list[Case]) -> Outcome:
    """Return the outcome of these cases."""
    failures = [text for case in cases if (text := wrong(case)) is not None]
    defaults = [case for case in cases if case.settings == "default"]
    poor = [case for case in defaults if case.verdict == "poor"]
    failures += [f"default is poor: {case}" for case in poor] if len(poor) > 0.01 * len(defaults) else []
    bad = [case for case in cases if case.loss > MOST_LOSS]
    found = sum(case.verdict != "good" for case in bad)
    counts = {"good": sum(case.verdict == "good" for case in cases), "found": found, "bad": len(bad)}
    counts |= {"poor": len(poor), "defaults": len(defaults)}
    return Outcome(len(cases), failures, counts=counts)


CHECKS = {one.__name__: one for one in (verdicts,)}
