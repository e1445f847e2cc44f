"""The kernel model as a candidate: settings are selected, a solver finds f and a sampler, and log Z is
computed."""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import numpy as np

from kexpfam.data.scaling import Scaling
from kexpfam.fit.features import build_space, centre_rows
from kexpfam.fit.mixture import best_mixture
from kexpfam.fit.problem import Problem, Solution, Solver, mean_feature
from kexpfam.fit.select import (
    FEW_DIMS,
    WORST_LOSS,
    Context,
    Kernel,
    Scaled,
    Selection,
    reduced,
    search,
)
from kexpfam.fit.task import Candidate, Fitted, Task
from kexpfam.integrate.nodes import uses_grid
from kexpfam.integrate.partition import log_partition
from kexpfam.model.density import Completion, TiltedDensity
from kexpfam.model.kernels import KERNELS
from kexpfam.model.measures import AbstractMeasure, Box
from kexpfam.model.spaces import Constant, FeatureSpace, RandomFeatures
from kexpfam.stacklevel import caller_level

# Penalties of the selection differ from those of the fit by rounding.
ROUNDING = 1.01


class UnresolvedFitWarning(UserWarning):
    """A grid does not resolve f, so that a larger penalty was used."""


class KernelFit(NamedTuple):
    """The problem that was solved, its solution, and the selection of its settings."""

    problem: Problem
    solution: Solution
    selection: Selection


class KernelCandidate(Candidate):
    """The kernel exponential family with these settings, found by this solver."""

    name: ClassVar[str] = "kernel"

    def __init__(self, kernel: Kernel, solver: Solver):
        self.kernel, self.solver = kernel, solver

    def refusal(self, task: Task) -> str | None:
        if not task.numeric:
            return "the kernel model needs real columns without missing values: use model='chain' or 'auto'."
        if task.support is not None and self.kernel.base not in (None, "box"):
            return "with bounds the base is a box: leave the kernel's base at None or 'box'."
        grid = uses_grid(task.dim, conditional=task.conditional, settings=self.kernel.integration)
        if self.solver.grid_only and task.conditional and not grid:
            name = type(self.solver).__name__
            return f"{name} needs a grid, and y has {task.dim} columns: use solver='auto'."
        return None

    def fit(self, task: Task, earlier: Mapping[str, Fitted]) -> Fitted | None:
        scalings = self._scalings(task)
        scaled = {
            power: Scaled.of(scaling, task.values, task.sample.condition, task.sample.weight)
            for power, scaling in scalings.items()
        }
        boxes: dict[bool, AbstractMeasure] | None = None
        if task.support is not None:
            boxes = {power: Box(*scaling.to_model(task.support)) for power, scaling in scalings.items()}
        proposal = self._proposal(task, scaled[max(scaled)], earlier)
        most = FEW_DIMS if task.compared else None
        shared = (self.kernel, task.splits, task.keys.seed, proposal)
        selection = search(scaled, Context(*shared, boxes, most, task.compared, task.report))
        if selection is None:
            return None
        power = selection.settings.power
        return self._solved(task, selection, scaled[power], scalings[power], proposal)

    def _scalings(self, task: Task) -> dict[bool, Scaling]:
        """Return the scalings of the target that the search chooses from, by whether they have a power
        transformation."""
        if not task.conditional:
            return {False: task.scaling}
        powers = (False, True) if self.kernel.power is None else (bool(self.kernel.power),)
        transformed = lambda: Scaling.of(task.values, task.kinds, power=True, weight=task.sample.weight)
        return {power: transformed() if power else task.scaling for power in powers}

    def _proposal(self, task: Task, scaled: Scaled, earlier: Mapping[str, Fitted]) -> AbstractMeasure | None:
        """Return a mixture for importance draws, or None if nothing draws from it."""
        grid = uses_grid(task.dim, conditional=task.conditional, settings=self.kernel.integration)
        if grid and not self.solver.uses_proposal:
            return None
        if "mixture" in earlier:
            density: Any = earlier["mixture"].density
            return density.law
        return best_mixture(np.asarray(scaled.sample.target), seed=task.keys.seed, weight=task.sample.weight)

    def _solved(
        self,
        task: Task,
        selection: Selection,
        scaled: Scaled,
        scaling: Scaling,
        mixture: AbstractMeasure | None,
    ) -> Fitted:
        """Return the fitted model with the selected settings."""
        settings, base, sample = selection.settings, selection.base, scaled.sample
        part, part_base, proposal = reduced(sample, base, settings.dims, mixture or base)
        space = self._space(task, part, selection)
        mean, of_all_rows = None, task.mean_feature
        if not task.conditional:
            mean = of_all_rows(space, scaling, settings.dims) if of_all_rows else mean_feature(space, part)
        integration = self.kernel.integration
        problem = Problem(part, part_base, space, settings.rkhs_penalty, proposal, integration, mean)
        checkpoint = task.checkpoint_for("kernel", (problem, self.solver))
        solution = self.solver.solve(problem, key=task.keys.solver, report=task.report, checkpoint=checkpoint)
        penalty = solution.facts.get("rkhs_penalty", 0.0)
        if penalty > settings.rkhs_penalty and problem.on_grid:
            _note_raised_penalty(selection, penalty, self.kernel.name)
        completion = None if len(settings.dims) == task.dim else Completion(base, settings.dims)
        density = self._density(task, problem, solution, scaling, completion)
        details = KernelFit(problem, solution, selection)
        return Fitted(density, selection.held_out, solution.status, solution.facts, solution.trace, details)

    def _space(self, task: Task, sample: Any, selection: Selection) -> FeatureSpace:
        settings, features = selection.settings, self.kernel.features(conditional=task.conditional)
        if self.kernel.space == "random_features" and not task.conditional:
            kernel = KERNELS[self.kernel.name](settings.lengthscale)
            shape: Any = {"count": features.centres, "key": task.keys.space}
            return FeatureSpace(Constant(), RandomFeatures.draw(kernel, sample.target.shape[1], **shape))
        centres = centre_rows(sample, features, seed=task.keys.seed)
        return build_space(self.kernel.name, sample, centres, settings.lengthscales, features)

    def _density(
        self,
        task: Task,
        problem: Problem,
        solution: Solution,
        scaling: Scaling,
        completion: Completion | None,
    ) -> TiltedDensity:
        """Return the density of the solution, with its normaliser."""
        key, integration, grid = task.keys.density, problem.integration, problem.on_grid
        tilt, sampler, estimate = on_host(solution.tilt), on_host(solution.sampler), None
        if not task.conditional:
            options: Any = {"method": self.kernel.normaliser, "settings": integration, "key": key}
            estimate = log_partition(tilt, sampler.reference, np.asarray(problem.sample.target), **options)
        finer = problem.nodes(fineness=integration.finer, key=key) if task.conditional or grid else None
        coarse = problem.nodes(key=key) if task.conditional and grid else None
        return TiltedDensity(tilt, sampler, scaling, task.inputs, estimate, finer, coarse, completion)


def _note_raised_penalty(selection: Selection, penalty: float, name: str) -> None:
    """Warn that a grid needs a larger penalty; raise if kinks are the reason and held-out rows lose by it."""
    settings, chosen = selection.settings, selection.chosen
    if chosen is not None and not KERNELS[name].smooth:
        ratio = lambda trial: np.log(trial.settings.lengthscale / settings.lengthscale)
        distance = lambda trial: (float(np.abs(ratio(trial)).max()), -trial.score)
        larger = [one for one in selection.trials if one.settings.rkhs_penalty * ROUNDING >= penalty]
        score = min(larger, key=distance).score if larger else -np.inf
        if score < chosen.score - WORST_LOSS:
            raise ValueError(
                f"held-out rows have a mean log density of {score:.2f} at the penalty that the grid needs, "
                f"and of {chosen.score:.2f} at the chosen one: grids do not resolve the kinks of "
                f"kernel={name!r}. Use a smooth kernel, such as 'gaussian' or 'matern32'."
            )
    message = (
        f"the grid does not resolve f at penalty {settings.rkhs_penalty:.1g}: the penalty is {penalty:.1g}, "
        "where an infinite one leaves the base. A longer lengthscale or a smoother kernel may fit better."
    )
    warnings.warn(message, UnresolvedFitWarning, stacklevel=caller_level())


def on_host(module: Any) -> Any:
    """Return a module with its arrays as NumPy arrays, which keep their precision when unpickled."""
    arrays, rest = eqx.partition(module, eqx.is_array)
    return eqx.combine(jax.tree.map(np.asarray, arrays), rest)
