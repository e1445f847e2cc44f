"""The problem that a solver gets, the solution that it returns, and the registry of solvers."""

import abc
import dataclasses
import enum
import importlib
import inspect
from typing import Any, ClassVar, NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

import equinox as eqx
import numpy as np
from jaxtyping import Float

from kexpfam.data.sample import AnyArray, RandomKey, Sample
from kexpfam.integrate.nodes import Integration, grid_nodes, importance_nodes, uses_grid
from kexpfam.model.density import Sampler, Tilt
from kexpfam.model.measures import AbstractMeasure, Nodes
from kexpfam.model.spaces import FeatureSpace
from kexpfam.progress import Listener
from kexpfam.settings import SettingsRecord


class Problem(eqx.Module):
    """The sample, the base measure, the space of f and the penalty ``eta / 2 |f|^2``.

    ``proposal`` is an approximation of the density; importance draws come from it and the base. A problem
    contains only the coordinates that f depends on; ``density.Completion`` adds the others.

    ``mean_feature`` is the mean of the features over all rows; the sample may then be a part of the rows.
    Without it, or in another space, it is the mean over the sample. It is None under conditions.
    """

    sample: Sample
    base: AbstractMeasure
    space: FeatureSpace
    rkhs_penalty: float
    proposal: AbstractMeasure
    integration: Integration = Integration()
    mean_feature: Float[AnyArray, " r"] | None = None

    @property
    def conditional(self) -> bool:
        """Return whether the density is conditional."""
        return self.sample.conditional

    @property
    def on_grid(self) -> bool:
        """Return whether the integrals are computed on a grid."""
        return uses_grid(self.sample.target.shape[1], conditional=self.conditional, settings=self.integration)

    def tilt(self, weights: AnyArray) -> Tilt:
        """Return the unnormalised density of f with these weights."""
        return Tilt(self.space, np.asarray(weights), self.base)

    def within(self, space: FeatureSpace) -> "Problem":
        """Return the problem with f in another space."""
        same = self.mean_feature is not None and eqx.tree_equal(space, self.space)
        mean = self.mean_feature if same else None
        return dataclasses.replace(self, space=space, mean_feature=mean)

    def trimmed(self, rows: np.ndarray) -> "Problem":
        """Return the problem with some of its rows and those at the ends of the range.

        The mean feature represents the other rows.
        """
        assert self.mean_feature is not None, "the problem has no mean feature of all rows"
        target = np.asarray(self.sample.target)
        ends = np.concatenate([target.argmin(axis=0), target.argmax(axis=0)])
        return eqx.tree_at(lambda problem: problem.sample, self, self.sample.rows(np.union1d(rows, ends)))

    def nodes(
        self,
        *,
        proposal: AbstractMeasure | None = None,
        fineness: float = 1.0,
        draws: int | None = None,
        key: RandomKey | None,
    ) -> Nodes:
        """Return nodes for the partition functions: a grid in few dimensions, else importance draws."""
        settings = self.integration
        if self.on_grid:
            data = np.asarray(self.sample.target)
            return grid_nodes(self.base, data, settings, conditional=self.conditional, fineness=fineness)
        if key is None:
            raise TypeError("importance draws need a key.")
        return importance_nodes(self.base, proposal or self.proposal, draws or settings.draws, key=key)


class Status(enum.Enum):
    """Why a solver stopped; the value is advice for the reader."""

    CONVERGED = "The optimality conditions hold to tolerance."
    RAN_ALL_STEPS = "All steps ran; diagnose() measures the quality of the result."
    DIVERGED = "The run diverged and was rolled back: lower the rates, or raise rkhs_penalty."
    GRID_TOO_COARSE = "The integral changes on a finer grid: raise Integration(cells=...) or lengthscale."
    FEW_EFFECTIVE_DRAWS = "Too few importance draws are effective: use a stronger base or raise rkhs_penalty."
    OUT_OF_TIME = "The time budget ended the training: this is the best state so far. Raise time_budget."
    NO_STEPS = "No steps were requested: f and the sampler are those of the start."


class Solution(NamedTuple):
    """f, a sampler, the status, the trace by step, facts about the end, and snapshots by step."""

    tilt: Tilt
    sampler: Sampler
    status: Status
    trace: dict[str, np.ndarray]
    facts: dict[str, float]
    snapshots: dict[str, np.ndarray] | None = None


@runtime_checkable
class Checkpoint(Protocol):
    """A place where a run stores its state and reads it again."""

    def read(self, template: eqx.Module) -> tuple[eqx.Module, dict[str, np.ndarray]]:
        """Return the stored state, or the template if there is none, and the trace of the steps before it."""
        ...

    def write(self, state: eqx.Module, trace: dict[str, np.ndarray]) -> None:
        """Store the state and the trace of the steps before it."""
        ...


class Watchers(TypedDict, total=False):
    """The listener and the checkpoint of a run."""

    report: Listener | None
    checkpoint: Checkpoint | None


class Solver(SettingsRecord):
    """A method to find f and a sampler: a record of its settings with the method ``solve``.

    ``supports_conditions`` is true if it solves for p(y | x). ``records`` names the series of its trace, one
    number per step; it is empty for a solver without steps.
    """

    supports_conditions: ClassVar[bool] = False
    records: ClassVar[tuple[str, ...]] = ()

    @property
    def grid_only(self) -> bool:
        """Return whether it needs a grid over the target."""
        return False

    @property
    def uses_proposal(self) -> bool:
        """Return whether it draws from the problem's proposal although there is a grid."""
        return True

    @abc.abstractmethod
    def solve(self, problem: Problem, *, key: RandomKey, **watchers: Unpack[Watchers]) -> Solution:
        """Return f and a sampler for the problem."""


# The registry of solvers: name, module, class and settings.
SOLVERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "auto": ("fit.convex", "Convex", {}),
    "exact": ("fit.convex", "Convex", {"integral": "grid"}),
    "dde": ("fit.dde", "DDE", {}),
    "functional": ("paper.functional", "FunctionalGradient", {}),
    "random_features": ("paper.functional", "RandomFeatureGradient", {}),
    "adapted": ("paper.learned_features", "AdaptedFeatures", {}),
    "deep": ("paper.learned_features", "DeepNetwork", {}),
    "singly_dual": ("paper.singly_dual", "SinglyDual", {}),
    "mmd_gan": ("paper.mmd_gan", "MMDGAN", {}),
    "contrastive": ("paper.ascent", "ContrastiveDivergence", {}),
    "annealed": ("paper.ascent", "AnnealedLikelihood", {}),
    "moment_matching": ("paper.moment_matching", "MomentMatching", {}),
}


def solver_from(given: Any, *, conditional: bool) -> Solver:
    """Return the solver of that name, or the given solver; raise if it cannot solve the problem."""
    names = ", ".join(SOLVERS)
    if inspect.isclass(given):
        name = given.__name__
        raise TypeError(f"solver={name} is a class: pass an object, as in solver={name}().")
    if isinstance(given, str):
        if given not in SOLVERS:
            raise ValueError(f"unknown solver {given!r}: choose one of {names}, or pass a Solver.")
        module, name, settings = SOLVERS[given]
        given = getattr(importlib.import_module(f"kexpfam.{module}"), name)(**settings)
    if not isinstance(given, Solver):
        raise TypeError(f"solver must be one of {names}, or a Solver; got a {type(given).__name__}.")
    if conditional and not given.supports_conditions:
        name = type(given).__name__
        raise ValueError(f"{name} does not support conditions: use solver='auto', 'exact' or 'dde'.")
    return given


def mean_feature(space: FeatureSpace, sample: Sample) -> np.ndarray:
    """Return the weighted mean of the features of the target over the rows of a sample."""
    count = len(sample) if sample.weight is None else float(np.sum(sample.weight))
    return space.target.total(sample.target, sample.weight) / count
