"""What both of the library's own estimators are: candidates are posed, compared on held-out rows, and made a density."""

import abc
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Key

from kexpfam import storage
from kexpfam.data.blocks import Rows
from kexpfam.data.kinds import AbstractKind, Bounded, Integer, Positive, Real
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.data.units import Units
from kexpfam.data.weights import effective_rows
from kexpfam.estimators.base import check_scale, keys_from, one_of, shown, whole
from kexpfam.estimators.reading import TableReader
from kexpfam.fit.bases import BASES, best_mixture, best_shape, fit_mixture, mixture_held_out
from kexpfam.fit.certificate import certified
from kexpfam.fit.learned import EFFORTS, Learned, learn
from kexpfam.fit.polish import Polish
from kexpfam.fit.problem import Problem, Solution, Solver, mean_feature, solver_from
from kexpfam.fit.select import (
    FEW_DIMS,
    Context,
    Features,
    Fixed,
    Scaled,
    Search,
    Selection,
    Settings,
    build_space,
    centre_rows,
    contend,
    reduced,
)
from kexpfam.fit.stack import Candidate, compare
from kexpfam.integrate.nodes import Integration, seed_from, uses_grid
from kexpfam.integrate.partition import log_partition
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.judge.measure import diagnose
from kexpfam.model.density import Completion, Density, Inputs
from kexpfam.model.distributions import AbstractDensity
from kexpfam.model.ensemble import LawDensity, LearnedDensity, MixedDensity, Stack
from kexpfam.model.kernels import KERNELS
from kexpfam.model.measures import AbstractMeasure, Box
from kexpfam.model.mixed import Embedding, Wiring
from kexpfam.model.spaces import FeatureSpace
from kexpfam.progress import Listener

__all__ = ["KernelModel", "checked_bounds", "on_host"]

# With more rows chains have always been better than a kernel model of p(y | x), and faster (docs/decisions/0011).
MOST_CONDITIONAL_ROWS = 400
# With fewer rows than this no chain is learned.
FEWEST_LEARNED_ROWS = 100
# Parts of the rows that a plain mixture is scored on in turn.
MIXTURE_PARTS = 3
KEYS = 5


class Training(NamedTuple):
    """The training rows in the data's units, and their conditions in model units."""

    targets: np.ndarray
    condition: np.ndarray
    inputs: Scaling
    weight: np.ndarray | None

    @property
    def effective(self) -> float:
        """Return the effective sample size."""
        return effective_rows(self.weight, len(self.targets))


class Posed(NamedTuple):
    """A candidate: the log density of rows it had not seen, if others compete with it, and how its density is made."""

    held_out: np.ndarray | None
    density: Callable[[], AbstractDensity]


class KernelModel(TableReader):
    """What both estimators are: candidates compete for the rows they have not seen, and a density is made of the best.

    The kernel model chooses its settings and has a solver find f and a sampler. A learned chain and a plain mixture stand
    beside it where there are more columns or rows than a kernel can serve.
    """

    _problem: Problem | None
    solution_: Solution | None
    selection_: Selection | None
    candidates_: list[Candidate]
    polish_: Polish | None
    lengthscale_: np.ndarray | None
    rkhs_penalty_: float | None
    base_: AbstractMeasure | None

    def _fit_model(self, targets: np.ndarray, X: np.ndarray, listener: Listener | None) -> Self:
        """Fit to targets under conditions, which may have width zero."""
        self._checked_solver(targets.shape[1], X.shape[1])
        self._problem = self.solution_ = self.selection_ = self.polish_ = None
        self.lengthscale_, self.rkhs_penalty_, self.base_ = None, None, None
        inputs = self._inputs(X)
        rows, keys = (
            Training(targets, inputs.to_model(X), inputs, self._weight),
            keys_from(self.random_state, KEYS),
        )
        mixed = self._checked_kinds(targets)
        bounded = not mixed and self._support(targets) is not None
        names = self._contenders(rows.effective, targets.shape[1], X.shape[1], bounded=bounded, mixed=mixed)
        pose = {"kernel": self._pose_kernel, "mixture": self._pose_mixture, "chain": self._pose_chain}
        found = {name: pose[name](rows, keys, listener, alone=len(names) == 1) for name in names}
        posed = {name: candidate for name, candidate in found.items() if candidate is not None}
        self.candidates_ = self._compared(posed)
        chosen = [candidate for candidate in self.candidates_ if candidate.weight > 0.0]
        parts: tuple[Any, ...] = tuple(posed[candidate.name].density() for candidate in chosen)
        weights = np.array([one.weight for one in chosen])
        self.density_ = parts[0] if len(parts) == 1 else Stack(parts, weights, parts[0].scaling)
        return self

    def _compared(self, posed: dict[str, Posed]) -> list[Candidate]:
        """Return the candidates with their weights; a single one has all of it."""
        held_out = {
            name: candidate.held_out for name, candidate in posed.items() if candidate.held_out is not None
        }
        return (
            compare(held_out, self._weight)
            if held_out
            else [Candidate(name, 1.0, np.nan, np.nan) for name in posed]
        )

    def _inputs(self, X: np.ndarray) -> Scaling:
        """Return the map from conditions to model units; labels, angles, atoms and gaps are embedded in several numbers."""
        kinds = self._columns.kinds if self.conditional else ()
        numbers = all(isinstance(kind, Real | Positive | Bounded | Integer) for kind in kinds)
        if numbers and not np.any(np.isnan(X)):
            return Scaling.standardising(X, power=True, weight=self._weight, logs=_logs(kinds))
        return Embedding.fitted(X, kinds, weight=self._weight)

    def _is_mixed(self, targets: np.ndarray) -> bool:
        """Return whether only a chain can be a density of them: not all are numbers, or some have gaps or open ends."""
        kinds = self._described.kinds
        numbers = all(isinstance(kind, Real | Positive | Bounded) for kind in kinds)
        bounded = [kind for kind in kinds if isinstance(kind, Bounded)]
        box = len(bounded) in (0, len(kinds)) and all(np.all(np.isfinite(kind.ends)) for kind in bounded)
        return not (numbers and box) or bool(np.any(np.isnan(targets)))

    def _support(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the lower and the upper ends of a box that all targets lie in, one row each, or None."""
        kinds = self._described.kinds
        if self.bounds is not None:
            return checked_bounds(self.bounds, targets)
        if not all(isinstance(kind, Bounded) for kind in kinds):
            return None
        low, high = np.array([kind.ends for kind in kinds]).T[:, None]
        return low, high

    @property
    def _settled(self) -> bool:
        """Return whether the user asked for a kernel model by one of its settings."""
        params = self.get_params(deep=False)
        names = (
            "lengthscale",
            "rkhs_penalty",
            "condition_lengthscale",
            "base_width",
            "power",
            "search",
            "integration",
        )
        named = any(params.get(name) is not None for name in names)
        return named or self.solver != "auto" or params.get("space", "nystrom") != "nystrom"

    def _contenders(
        self, rows: float, dim: int, condition_dim: int, *, bounded: bool, mixed: bool
    ) -> tuple[str, ...]:
        """Return the kinds of models that compete; settings that only one of them has are a choice of that one."""
        if self.base == "chain" or mixed:
            return ("chain",)
        few = condition_dim == 0 and dim <= FEW_DIMS
        if (
            self.base is not None
            or self._settled
            or rows < FEWEST_LEARNED_ROWS
            or (few and self.effort != "best")
        ):
            return ("kernel",)
        if condition_dim:
            return ("kernel", "chain") if dim == 1 and rows <= MOST_CONDITIONAL_ROWS else ("chain",)
        return ("kernel", "chain") if few else ("chain",) if bounded else ("kernel", "mixture", "chain")

    def _pose_kernel(
        self, rows: Training, keys: list[Key[Array, ""]], listener: Listener | None, *, alone: bool
    ) -> Posed | None:
        """Return the kernel model, once its settings are found; none if f would depend on too many coordinates."""
        targets, condition, _, weight = rows
        solver, seed = self._checked_solver(targets.shape[1], condition.shape[1]), seed_from(keys[0])
        fixed, integration = self._fixed(), self.integration or Integration()
        powers = (False, True) if fixed.power is None else (bool(fixed.power),)
        logs = _logs(self._described.kinds)
        scalings = {
            power: Scaling.standardising(targets, power=power, weight=weight, logs=logs) for power in powers
        }
        scaled = {
            power: Scaled.of(scaling, targets, condition, weight) for power, scaling in scalings.items()
        }
        if (support := self._support(targets)) is not None:
            low, high = support
            fixed = fixed._replace(
                base={p: Box(s.to_model(low)[0], s.to_model(high)[0]) for p, s in scalings.items()}
            )
        mixture = self._proposal(scaled, solver, integration, seed)
        context = Context(fixed, self.search or Search(), integration, mixture, seed, listener)
        self.selection_ = selection = contend(
            scaled, context, most_dims=None if alone else FEW_DIMS, held_out=not alone
        )
        if selection is None:
            return None
        chosen = scaled[selection.settings.power].sample, scalings[selection.settings.power]
        finish = lambda: self._solved(selection, *chosen, mixture, rows, solver, keys, listener)
        return Posed(selection.held_out, finish)

    def _solved(
        self,
        selection: Selection,
        sample: Sample,
        scaling: Scaling,
        mixture: AbstractMeasure | None,
        rows: Training,
        solver: Solver,
        keys: list[Key[Array, ""]],
        listener: Listener | None,
    ) -> Density:
        """Return the density of the kernel model with these settings."""
        settings, base = selection.settings, selection.base
        part, part_base, proposal = reduced(sample, base, settings.dims, mixture or base)
        space = self._space(part, settings, seed_from(keys[0]), key=keys[1])
        mean = (
            None if sample.conditional else self._mean_feature(space, part, scaling, settings.dims, listener)
        )
        integration = self.integration or Integration()
        problem = Problem(part, part_base, space, settings.rkhs_penalty, proposal, integration, mean)
        checkpoint = (
            storage.Checkpoint(self.checkpoint, (problem, solver)) if self.checkpoint is not None else None
        )
        solution = solver.solve(problem, key=keys[2], report=listener, checkpoint=checkpoint)
        completion = None if len(settings.dims) == sample.target.shape[1] else Completion(base, settings.dims)
        self._problem, self.solution_ = problem, solution
        self.lengthscale_, self.rkhs_penalty_, self.base_ = settings.lengthscale, settings.rkhs_penalty, base
        return self._density(
            problem, solution, scaling, Inputs.of(rows.inputs, rows.condition), completion, key=keys[3]
        )

    def _mean_feature(
        self,
        space: FeatureSpace,
        part: Sample,
        scaling: Scaling,
        dims: tuple[int, ...],
        listener: Listener | None,
    ) -> np.ndarray:
        """Return the mean of the features of f over all rows, of which ``part`` are those that are held, in f's coordinates."""
        return mean_feature(space, part)

    def _pose_mixture(
        self, rows: Training, keys: list[Key[Array, ""]], listener: Listener | None, *, alone: bool
    ) -> Posed:
        """Return a plain mixture of normals."""
        logs = _logs(self._described.kinds)
        scaling, seed = Scaling.standardising(rows.targets, weight=rows.weight, logs=logs), seed_from(keys[0])
        points = scaling.to_model(rows.targets)
        how: dict[str, Any] = {"seed": seed, "weight": rows.weight}
        shape = best_shape(points, **how)
        parts = np.array_split(np.random.default_rng(seed).permutation(len(points)), MIXTURE_PARTS)
        held_out = mixture_held_out(points, shape, parts, **how) + scaling.log_jacobian(rows.targets)
        return Posed(held_out, lambda: LawDensity(fit_mixture(points, shape, **how), scaling))

    def _pose_chain(
        self, rows: Training, keys: list[Key[Array, ""]], listener: Listener | None, *, alone: bool
    ) -> Posed:
        """Return a learned chain."""
        targets, condition, inputs, weight = rows
        settings, kinds = self.learned or EFFORTS[self.effort], self._described.kinds
        # The tails of logarithms, and of what is warped like them, are thin: others would be astronomic in the data's units.
        wired, support, warped, wiring = self._is_mixed(targets) or any(_logs(kinds)), None, None, None
        scaling = (
            Units.of(targets, kinds, weight=weight)
            if wired
            else Scaling.standardising(targets, weight=weight)
        )
        sample = Sample(scaling.to_model(targets), condition, weight)
        if isinstance(scaling, Units):
            wiring = Wiring.of(scaling, sample.target)
        else:
            warped = np.array(scaling.warped) if any(scaling.warped) else None
            if (ends := self._support(targets)) is not None:
                support = np.concatenate([scaling.to_model(side) for side in ends])
        task = (sample, settings, support, wiring)
        place = None if self.checkpoint is None else storage.Checkpoint(f"{self.checkpoint}.chain", task)
        known: Any = {"support": support, "warped": warped, "wiring": wiring}
        ensemble = learn(sample, settings, key=keys[4], **known, report=listener, checkpoint=place)
        self.polish_ = ensemble.polish
        made: Any = MixedDensity if wired else LearnedDensity
        density = made(ensemble.chain, scaling, Inputs.of(inputs, condition))
        return Posed(ensemble.held_out + scaling.log_jacobian(targets), lambda: density)

    def _proposal(
        self, scaled: dict[bool, Scaled], solver: Solver, integration: Integration, seed: int
    ) -> AbstractMeasure | None:
        """Return a mixture to draw importance nodes from, if anything is going to."""
        sample = scaled[max(scaled)].sample
        grid = uses_grid(sample.target.shape[1], conditional=sample.conditional, settings=integration)
        if grid and not solver.uses_proposal:
            return None
        return best_mixture(np.asarray(sample.target), seed=seed, weight=sample.weight)

    def _density(
        self,
        problem: Problem,
        solution: Solution,
        scaling: Scaling,
        inputs: Inputs,
        completion: Completion | None,
        *,
        key: Key[Array, ""],
    ) -> Density:
        """Return the density of the solution, with its normaliser."""
        tilt, sampler, *_ = solution
        finer, coarse = (
            problem.nodes(fineness=fineness, key=key) for fineness in (problem.integration.finer, 1.0)
        )
        tilt, sampler = on_host(tilt), on_host(sampler)
        if problem.conditional:
            return Density(
                tilt, sampler, scaling, inputs, None, finer, coarse if finer.is_grid else None, completion
            )
        data, how = np.asarray(problem.sample.target), self.get_params(deep=False).get("normaliser", "auto")
        options = {"method": how, "settings": problem.integration, "key": key}
        estimate = log_partition(tilt, sampler.reference, data, **options)
        return Density(
            tilt, sampler, scaling, inputs, estimate, finer if finer.is_grid else None, None, completion
        )

    def _diagnosed(
        self, calibration: list[Measurement], settings: Judgement, key: Key[Array, ""]
    ) -> Diagnosis:
        polish = {} if self.polish_ is None else self.polish_._asdict()
        return diagnose(
            self.density_,
            self._training,
            self._weight,
            candidates=self.candidates_,
            status={"kernel": self.solution_.status} if self.solution_ is not None else {},
            facts={"chain": {f"polish_{name}": polish[name] for name in ("gain", "gap") if name in polish}},
            certify=None if self._problem is None else functools.partial(certified, self._problem),
            calibration=calibration,
            settings=settings,
            key=key,
        )

    def _fixed(self) -> Fixed:
        names = self.get_params(deep=False)
        return Fixed(**{name: names.get(name) for name in Fixed._fields})

    def _checked_kinds(self, targets: np.ndarray) -> bool:
        """Return whether only a chain can be the density, once nothing asks for another."""
        mixed = self._is_mixed(targets)
        if mixed and (self._settled or self.base not in (None, "chain")):
            raise ValueError(
                "columns that are not all real, or have missing cells, are learned by a chain: leave base, solver and the "
                "kernel's settings alone."
            )
        if self.bounds is not None and not (self._described.plain and not mixed):
            raise ValueError(
                "bounds are for tables of real columns: say columns={...: 'bounded:0:1'} for those that have some."
            )
        return mixed

    def _checked_solver(self, target_dim: int, condition_dim: int) -> Solver:
        """Return the solver, once every setting is known to make sense."""
        one_of("kernel", self.kernel, KERNELS)
        one_of("effort", self.effort, EFFORTS)
        if isinstance(self.base, str):
            one_of("base", self.base, (*BASES, "chain"))
        elif self.base is not None and not isinstance(self.base, AbstractMeasure):
            raise TypeError(
                f"base must be one of {', '.join(BASES)}, chain, a measure or None; got {shown(self.base)}."
            )
        if self.bounds is not None and self.base not in (None, "box", "chain"):
            raise ValueError("bounds make the base a box or a chain: leave base at None, 'box' or 'chain'.")
        if self.base == "chain" and self._settled:
            raise ValueError(
                "a chain is learned whole: with base='chain' leave the kernel's settings and the solver alone."
            )
        if not isinstance(self.checkpoint, str | os.PathLike | None):
            raise TypeError(f"checkpoint must be a path or None, got {shown(self.checkpoint)}.")
        check_scale("rkhs_penalty", self.rkhs_penalty, ())
        if self.n_centres is not None:
            whole("n_centres", self.n_centres, 1)
        for name, record in (
            ("search", Search),
            ("integration", Integration),
            ("learned", Learned),
            ("rows", Rows),
        ):
            if not isinstance(getattr(self, name), record | None):
                raise TypeError(
                    f"{name} must be a {record.__name__} or None, got {shown(getattr(self, name))}."
                )
        solver = solver_from(self.solver, conditional=condition_dim > 0)
        settings = self.integration or Integration()
        if (
            solver.grid_only
            and condition_dim
            and not uses_grid(target_dim, conditional=True, settings=settings)
        ):
            raise ValueError(
                f"{type(solver).__name__} needs a grid, and y has {target_dim} columns: use solver='auto'."
            )
        return solver

    def _space(self, sample: Sample, settings: Settings, seed: int, *, key: Key[Array, ""]) -> FeatureSpace:
        features = self._features()
        return build_space(
            self.kernel, sample, centre_rows(sample, features, seed=seed), settings.lengthscales, features
        )

    @abc.abstractmethod
    def _features(self) -> Features:
        """Return how many features f has."""


def _logs(kinds: tuple[AbstractKind, ...]) -> tuple[bool, ...]:
    """Return of each column whether its logarithm is modelled."""
    return (
        tuple(isinstance(kind, Positive) for kind in kinds)
        if any(isinstance(kind, Positive) for kind in kinds)
        else ()
    )


def checked_bounds(bounds: Any, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper bounds, one row each, once they are known to hold all targets."""
    try:
        low, high = (np.broadcast_to(np.asarray(side, float), (1, targets.shape[1])) for side in bounds)
    except (TypeError, ValueError):
        message = f"bounds must be a pair, each a number or one number per column ({targets.shape[1]}); got {shown(bounds)}."
        raise ValueError(message) from None
    if not np.all(np.isfinite(low) & np.isfinite(high) & (low < high)):
        raise ValueError(
            f"bounds must be finite, the lower below the upper one, in every column; got {shown(bounds)}."
        )
    if np.any((targets < low) | (targets > high)):
        raise ValueError("some rows lie outside the bounds; widen them, or remove these rows.")
    return low, high


def on_host(module: Any) -> Any:
    """Return a module with its arrays as NumPy arrays, which keep their precision whoever unpickles them."""
    arrays, rest = eqx.partition(module, eqx.is_array)
    return eqx.combine(jax.tree.map(np.asarray, arrays), rest)
