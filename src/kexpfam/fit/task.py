"""The protocol of the candidates: a ``Task`` goes in, a ``Fitted`` comes out.

Every candidate is fitted to the same rows in the same units. ``Splits`` decides which rows are held out, once
per fit, so that the held-out scores of all candidates refer to the same rows."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.random as jr
import numpy as np
from jaxtyping import Float, Int

from kexpfam.data.kinds import AbstractKind
from kexpfam.data.sample import RandomKey, Sample
from kexpfam.data.scaling import Scaling
from kexpfam.fit.problem import Checkpoint, Status
from kexpfam.integrate.nodes import seed_from
from kexpfam.model.density import Inputs
from kexpfam.model.distributions import AbstractDensity
from kexpfam.progress import Listener, TimeBudget


class Splits(NamedTuple):
    """Row indices of disjoint held-out parts, shape (parts, rows per part); some rows may be in no part."""

    rows: int
    held: Int[np.ndarray, "k h"]

    @staticmethod
    def draw(rows: int, *, parts: int, share: float, seed: int) -> "Splits":
        """Return at most ``parts`` random disjoint parts, each with this share of the rows."""
        size = max(1, int(share * rows))
        parts = min(parts, rows // size)
        order = np.random.default_rng(seed).permutation(rows)
        return Splits(rows, order[: parts * size].reshape(parts, size))

    @staticmethod
    def extended(part: np.ndarray, rows: int, *, share: float, seed: int) -> "Splits":
        """Return splits in which old rows stay in their part, and each part gets this share of new rows.

        ``part`` is the part of each old row, -1 for none. Parts are cut to the same size."""
        size, old = int(share * rows), len(part)
        order = old + np.random.default_rng(seed).permutation(rows)
        new = order[: (part.max() + 1) * size].reshape(-1, size)
        held = [np.concatenate([np.flatnonzero(part == k), own]) for k, own in enumerate(new)]
        least = min(map(len, held))
        return Splits(old + rows, np.stack([own[-least:] for own in held]))

    @property
    def part(self) -> Int[np.ndarray, " n"]:
        """Return the part of each row, -1 for rows in none."""
        found = np.full(self.rows, -1)
        found[self.held] = np.arange(len(self.held))[:, None]
        return found

    @property
    def folds(self) -> Int[np.ndarray, " n"]:
        """Return the part of each row; rows in none are parts of their own, each with at most a quarter of
        all rows."""
        found, rest = self.part, np.flatnonzero(self.part < 0)
        count = -(-4 * len(rest) // self.rows)
        found[rest] = len(self.held) + np.random.default_rng(len(rest)).permutation(len(rest)) % max(count, 1)
        return found

    @property
    def kept(self) -> Int[np.ndarray, "k m"]:
        """Return the rows outside each part."""
        return np.stack([np.setdiff1d(np.arange(self.rows), part) for part in self.held])

    @property
    def masks(self) -> np.ndarray:
        """Return the parts as boolean masks of shape (parts, rows)."""
        masks = np.zeros((len(self.held), self.rows), bool)
        masks[np.arange(len(self.held))[:, None], self.held] = True
        return masks


class Keys(NamedTuple):
    """Random keys of the stages of a fit."""

    selection: RandomKey
    space: RandomKey
    solver: RandomKey
    density: RandomKey
    chain: RandomKey

    @property
    def seed(self) -> int:
        """Return the seed of selection, splits and mixtures."""
        return seed_from(self.selection)


class Task(NamedTuple):
    """Everything a candidate is fitted to.

    ``values`` are the targets in data units, ``sample`` targets and conditions in model units with their
    weights. ``numeric`` is False if some targets are discrete, half-open or missing. ``support`` holds the
    lower and upper ends of a box around the targets, shape (2, d) in data units. ``compared`` is False if
    there is a single candidate, which needs no held-out scores. ``mean_feature`` computes means of features
    over rows that are not in memory. ``budget`` is the time that the fit may take."""

    values: Float[np.ndarray, "n d"]
    kinds: tuple[AbstractKind, ...]
    scaling: Scaling
    sample: Sample
    inputs: Inputs
    splits: Splits
    keys: Keys
    numeric: bool = True
    support: Float[np.ndarray, "2 d"] | None = None
    compared: bool = False
    report: Listener | None = None
    checkpoint: Callable[[str, Any], Checkpoint] | None = None
    mean_feature: Callable[..., np.ndarray] | None = None
    budget: TimeBudget | None = None

    @property
    def dim(self) -> int:
        """Return the number of targets."""
        return self.values.shape[1]

    @property
    def conditional(self) -> bool:
        """Return whether the targets have a condition."""
        return self.sample.conditional

    @property
    def log_jacobian(self) -> Float[np.ndarray, " n"]:
        """Return the term that turns log densities in model units into data units."""
        return self.scaling.log_jacobian(self.values)

    def checkpoint_for(self, name: str, fingerprint: Any) -> Checkpoint | None:
        """Return the checkpoint of a candidate, or None if the fit has none.

        Held-out rows and random keys are part of the fingerprint: a run that goes on with other held-out rows
        has already been trained on them."""
        if self.checkpoint is None:
            return None
        keys = [np.asarray(jr.key_data(key)) for key in self.keys]
        return self.checkpoint(name, (fingerprint, self.splits.held, keys))


class Fitted(eqx.Module):
    """A fitted candidate.

    Parameters
    ----------
    density : AbstractDensity
    held_out : array of shape (n,) or None
        Log density of each row, in data units, under fits that did not see it; NaN for rows in no held-out
        part.
    status : Status
        How the fit ended.
    facts : dict of float
        Named measurements.
    trace : dict of arrays
        One number per step.
    details : object
        The candidate's own record: settings, problem, solution.
    """

    density: AbstractDensity | None
    held_out: Float[np.ndarray, " n"] | None
    status: Status
    facts: dict[str, float]
    trace: dict[str, np.ndarray]
    details: Any = None


class Candidate(abc.ABC):
    """A density estimator that competes by held-out log density; ``name`` is its name in ``CANDIDATES``."""

    name: ClassVar[str]

    @abc.abstractmethod
    def refusal(self, task: Task) -> str | None:
        """Return why the candidate cannot be fitted to the task, or None if it can."""

    @abc.abstractmethod
    def fit(self, task: Task, earlier: Mapping[str, Fitted]) -> Fitted | None:
        """Return the fitted candidate, or None if it withdraws; ``earlier`` holds the candidates fitted
        before it."""
