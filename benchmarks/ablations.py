"""Ablations of a learned base: all parts, one member, one order, no tilt, no learned base.

    KEXPFAM_TABLES=FOLDER python benchmarks/ablations.py       # prints and appends a record

FOLDER has the sets of ``docs/real-tables.md``. NLL is in nats, in the units of that page: of concrete and of
yacht given their inputs, and of red wine as a joint density.
"""

import sys
import warnings
from pathlib import Path

import jax
import numpy as np
from ledger import append

from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily
from kexpfam.estimators import GaussianMixtureDensity
from kexpfam.fit.learned import Learned
from kexpfam.model import chain

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduction import real_data  # noqa: E402

__all__ = ["main", "variants"]

NO_TILT = 1e-9


def fitted(train: np.ndarray, conditional: bool, settings: Learned):
    """Return learned chains alone."""
    if conditional:
        return ConditionalKernelExpFamily(model="chain", learned=settings, random_state=0).fit(
            train[:, :-1], train[:, -1]
        )
    return KernelExpFamily(model="chain", learned=settings, random_state=0).fit(train)


def nll(model, test: np.ndarray, conditional: bool) -> float:
    """Return the mean negative log density of the test rows."""
    return -model.score(test[:, :-1], test[:, -1]) if conditional else -model.score(test)


def members(model, test: np.ndarray, conditional: bool) -> float:
    """Return the mean score of the single members."""
    density = model.density_
    targets, X = (test[:, -1:], test[:, :-1]) if conditional else (test, np.zeros((len(test), 0)))
    z, condition = density.scaling.to_model(targets), density.inputs.to_model(X) if conditional else X
    parts = [
        density.members.member(k).log_densities(z, condition, cells=288).sum(1) for k in range(len(density))
    ]
    return float(-np.mean(parts) - density.scaling.log_jacobian(targets).mean())


def variants(train: np.ndarray, test: np.ndarray, *, conditional: bool) -> dict[str, float]:
    """Return the NLL of each variant."""
    whole = fitted(train, conditional, Learned())
    found = {"whole": nll(whole, test, conditional), "one member": members(whole, test, conditional)}
    if not conditional:
        found["one order"] = nll(fitted(train, conditional, Learned(shuffled=False)), test, conditional)
    jax.clear_caches()
    chain.LARGEST_NORM, kept = NO_TILT, chain.LARGEST_NORM
    found["no tilt"] = nll(fitted(train, conditional, Learned()), test, conditional)
    chain.LARGEST_NORM = kept
    jax.clear_caches()
    if conditional:
        plain = ConditionalKernelExpFamily(
            model="kernel", kernel=Kernel(base="gaussian"), random_state=0
        ).fit(train[:, :-1], train[:, -1])
    else:
        plain = GaussianMixtureDensity(random_state=0).fit(train)
    found["no learned base"] = nll(plain, test, conditional)
    return {name: round(float(value), 3) for name, value in found.items()}


def main() -> None:
    warnings.simplefilter("ignore")
    splits = {
        "yacht": real_data.regression_split("yacht", 0),
        "concrete": real_data.regression_split("concrete", 0),
        "redwine": real_data.joint_split("redwine"),
    }
    for name, split in splits.items():
        found = variants(split.train, split.test, conditional=name != "redwine")
        print(name, found, flush=True)
        append("ablations", {"dataset": name, "nll": found})


if __name__ == "__main__":
    main()
