"""What is asked of a solver, what it answers, and who the solvers are."""

import abc
import enum
import importlib
import inspect
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Key

from kexpfam.data.sample import AnyArray, Sample
from kexpfam.integrate.nodes import Integration, integration_nodes, uses_grid
from kexpfam.model.density import Sampler, Tilt
from kexpfam.model.measures import AbstractMeasure, Nodes
from kexpfam.model.spaces import FeatureSpace
from kexpfam.progress import Listener
from kexpfam.settings import check_at_least

__all__ = [
    "SOLVERS",
    "Checkpoint",
    "Problem",
    "Solution",
    "Solver",
    "Status",
    "check_at_least",
    "mean_feature",
    "solver_from",
]


class Problem(eqx.Module):
    """The sample, the base measure, the space of f and the penalty ``eta / 2 |f|^2``.

    ``proposal`` is any guess of the density: importance draws come from it and the base. Only the coordinates that f
    depends on are in a problem; what the base says about the others is put back in ``density.Completion``.

    ``mean_feature`` is the mean of the features over all rows, of which the sample may then be only some; without it, or in
    another space, the mean over the sample stands for it. Under conditions there is none.
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
        """Return whether there is a condition."""
        return self.sample.conditional

    @property
    def on_grid(self) -> bool:
        """Return whether its integrals are done on a grid."""
        return uses_grid(self.sample.target.shape[1], conditional=self.conditional, settings=self.integration)

    def tilt(self, weights: AnyArray) -> Tilt:
        """Return the unnormalised density of f with these weights."""
        return Tilt(self.space, np.asarray(weights), self.base)

    def within(self, space: FeatureSpace) -> "Problem":
        """Return the problem with f in another space: some solvers choose the space as they go."""
        mean = (
            self.mean_feature if self.mean_feature is not None and eqx.tree_equal(space, self.space) else None
        )
        return Problem(
            self.sample, self.base, space, self.rkhs_penalty, self.proposal, self.integration, mean
        )

    def trimmed(self, rows: np.ndarray) -> "Problem":
        """Return the problem with some of its rows, and the range of all: what it knows of the others is their mean feature."""
        assert self.mean_feature is not None, "without the mean of all rows the sample is all there is"
        target = np.asarray(self.sample.target)
        ends = np.concatenate([target.argmin(axis=0), target.argmax(axis=0)])
        return eqx.tree_at(lambda problem: problem.sample, self, self.sample.rows(np.union1d(rows, ends)))

    def nodes(
        self,
        *,
        proposal: AbstractMeasure | None = None,
        fineness: float = 1.0,
        draws: int | None = None,
        key: Key[Array, ""] | None,
    ) -> Nodes:
        """Return nodes for the partition functions: a grid where there is one, else draws from base and proposal."""
        return integration_nodes(
            self.base,
            proposal or self.proposal,
            np.asarray(self.sample.target),
            conditional=self.conditional,
            settings=self.integration,
            fineness=fineness,
            draws=draws,
            key=key,
        )


class Status(enum.Enum):
    """Why a solver stopped; the value is advice for the person who reads it."""

    CONVERGED = "The optimality conditions hold to tolerance."
    RAN_ALL_STEPS = "All steps ran; diagnose() says whether the result is good."
    INTERRUPTED = "Interrupted: this is the last healthy state; resume from its checkpoint to go on."
    DIVERGED = "The run went astray and was rolled back: lower the rates, or raise rkhs_penalty."
    GRID_TOO_COARSE = (
        "The integral changes on a finer grid: raise Integration(cells=...), or the length scale."
    )
    FEW_EFFECTIVE_DRAWS = (
        "Too few importance draws are effective: a stronger base or a larger rkhs_penalty would help."
    )
    NO_STEPS = "No step was asked for: f and the sampler are the start's."


class Solution(NamedTuple):
    """The answer of any solver: f, a sampler, why it stopped, its trace, facts about its end, and snapshots by step."""

    tilt: Tilt
    sampler: Sampler
    status: Status
    trace: dict[str, np.ndarray]
    facts: dict[str, float]
    snapshots: dict[str, np.ndarray] | None = None


@runtime_checkable
class Checkpoint(Protocol):
    """Where a run can leave its state and find it again."""

    def read(self, template: eqx.Module) -> eqx.Module:
        """Return the stored state, or the template if there is none."""
        ...

    def write(self, state: eqx.Module) -> None:
        """Store the state."""
        ...


class Solver(eqx.Module):
    """A way to find f and a sampler; a record of its settings with one method.

    ``knows_conditions`` says whether it can solve for p(y | x), ``grid_only`` whether it needs a grid over the target,
    ``uses_proposal`` whether it draws from the problem's proposal although there is a grid, and ``records`` names the series
    of its trace, one number per step; a solver without steps has none.
    """

    knows_conditions: ClassVar[bool] = False
    uses_proposal: ClassVar[bool] = True
    records: ClassVar[tuple[str, ...]] = ()

    @property
    def grid_only(self) -> bool:
        return False

    @abc.abstractmethod
    def solve(
        self,
        problem: Problem,
        *,
        key: Key[Array, ""],
        report: Listener | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Solution:
        """Return f and a sampler for the problem."""


# The one place where a name becomes a solver: the room it lives in, its class, and its settings.
SOLVERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "auto": ("fit.convex", "Convex", {}),
    "exact": ("fit.convex", "Convex", {"integral": "grid"}),
    "dde": ("fit.dde", "DDE", {}),
    "functional": ("paper.functional", "FunctionalGradient", {}),
    "random_features": ("paper.random_features", "RandomFeatureGradient", {}),
    "adapted": ("paper.learned_features", "AdaptedFeatures", {}),
    "deep": ("paper.learned_features", "DeepNetwork", {}),
    "singly_dual": ("paper.singly_dual", "SinglyDual", {}),
    "mmd_gan": ("paper.mmd_gan", "MMDGAN", {}),
    "contrastive": ("paper.contrastive", "ContrastiveDivergence", {}),
    "annealed": ("paper.annealed", "AnnealedLikelihood", {}),
    "moment_matching": ("paper.moment_matching", "MomentMatching", {}),
}


def solver_from(given: Any, *, conditional: bool) -> Solver:
    """Return the solver of that name, or the one given; raise if it is none, or cannot do what is asked."""
    if inspect.isclass(given):
        raise TypeError(
            f"solver={given.__name__} is a class: pass an object, as in solver={given.__name__}()."
        )
    if isinstance(given, str):
        if given not in SOLVERS:
            raise ValueError(
                f"unknown solver {given!r}: choose one of {', '.join(SOLVERS)}, or pass a Solver."
            )
        module, name, settings = SOLVERS[given]
        given = getattr(importlib.import_module(f"kexpfam.{module}"), name)(**settings)
    if not isinstance(given, Solver):
        raise TypeError(
            f"solver must be one of {', '.join(SOLVERS)}, or a Solver; got a {type(given).__name__}."
        )
    if conditional and not given.knows_conditions:
        raise ValueError(
            f"{type(given).__name__} knows no condition: for p(y | x) use solver='auto', 'exact' or 'dde'."
        )
    return given


def mean_feature(space: FeatureSpace, sample: Sample) -> np.ndarray:
    """Return the mean of the features of the target over the rows of a sample."""
    count = len(sample) if sample.weight is None else float(np.sum(sample.weight))
    return space.target.total(sample.target, sample.weight) / count
