"""The part that both of the library's own estimators share: settings, candidates, row blocks and the
diagnosis."""

import copy
import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self

import equinox as eqx
import numpy as np
from jaxtyping import Array, Key
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from kexpfam import processes, storage
from kexpfam.data.blocks import RowBlocks, Rows, row_blocks
from kexpfam.data.columns import check_columns, check_kinds, check_targets
from kexpfam.data.kinds import AbstractKind, Bounded
from kexpfam.data.sample import RandomKey, Sample
from kexpfam.data.scaling import InputScaling, Scaling
from kexpfam.data.weights import part_of, weighted_mean
from kexpfam.estimators.base import Estimator, key_from, keys_from, listening, one_of, shown
from kexpfam.estimators.codec import kinds_of_targets
from kexpfam.estimators.row_source import RowSource, mean_score, paired_blocks
from kexpfam.fit.candidates import FEWEST_CHAIN_ROWS, MODELS, candidates
from kexpfam.fit.certificate import certified
from kexpfam.fit.chain import ChainCandidate
from kexpfam.fit.kernel import KernelFit
from kexpfam.fit.learned import EFFORTS, Learned
from kexpfam.fit.problem import Problem, Solution, Solver, solver_from
from kexpfam.fit.reference import (
    MOST_SCORED,
    Comparison,
    cross_validated,
    nearest_other,
    or_normal,
    plain_scores,
)
from kexpfam.fit.select import Kernel, Selection
from kexpfam.fit.stack import CandidateScore, compete
from kexpfam.fit.task import Candidate, Fitted, Keys, Splits, Task
from kexpfam.integrate.nodes import seed_from
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.judge.measure import Evidence, diagnose
from kexpfam.judge.novelty import Reference
from kexpfam.model.density import Inputs
from kexpfam.model.distributions import scores
from kexpfam.model.ensemble import ChainDensity, Stack
from kexpfam.model.measures import AbstractMeasure
from kexpfam.model.partial import log_evidence
from kexpfam.progress import Listener, TimeBudget
from kexpfam.settings import copy_changed_records

__all__ = ["KernelModel"]

# Completions of a row with missing values in columns that had few or none during fit.
GAP_DRAWS = 256
# The stream of random numbers that chooses the training rows that are kept.
KEPT_ROWS = 1


class KernelModel(Estimator):
    """Base class of ``KernelExpFamily`` and ``ConditionalKernelExpFamily``."""

    _takes_kinds: ClassVar[bool] = True
    _stored: ClassVar[tuple[str, ...]] = (
        "density_",
        "_training",
        "candidates_",
        "fits_",
        "n_rows_",
        "_part",
        "_comparison",
    )
    model: str
    kernel: str | Kernel
    solver: str | Solver
    learned: Learned | None
    effort: str
    bounds: Any
    columns: dict | None
    rows: Rows | None
    random_state: Any
    progress: bool | Listener
    checkpoint: str | os.PathLike | None
    candidates_: list[CandidateScore]
    fits_: dict[str, Fitted]
    n_rows_: int
    _part: np.ndarray | None = None  # the part in which each training row was held out, or -1
    _comparison: Comparison | None = None

    # Settings.

    def set_params(self, **params: Any) -> Self:
        """Set parameters; ``kernel__lengthscale`` sets a field of the record ``kernel``, as in
        scikit-learn."""
        nested = {key.partition("__")[0] for key in params if "__" in key}
        if "kernel" in nested and isinstance(params.get("kernel", self.kernel), str):
            params["kernel"] = Kernel(params.get("kernel", self.kernel))
        if "learned" in nested and params.get("learned", self.learned) is None:
            params["learned"] = EFFORTS[self.effort]
        if "rows" in nested and params.get("rows", self.rows) is None:
            params["rows"] = Rows()
        whole = {key: value for key, value in params.items() if "__" not in key}
        super().set_params(**whole)
        copy_changed_records(self, params)
        return super().set_params(**{key: value for key, value in params.items() if "__" in key})

    @property
    def _kernel(self) -> Kernel:
        """Return the settings of the kernel model; a name is its short form."""
        if isinstance(self.kernel, Kernel):
            return self.kernel
        if not isinstance(self.kernel, str):
            raise TypeError(f"kernel must be a name or a Kernel, got {shown(self.kernel)}.")
        return Kernel(self.kernel)

    @property
    def _learned(self) -> Learned:
        return self.learned or EFFORTS[self.effort]

    @property
    def _seed(self) -> Any:
        """Return the random state; with a checkpoint, None is 0, so that the same call resumes."""
        return 0 if self.random_state is None and self.checkpoint is not None else self.random_state

    def _asked(self, rows: int) -> frozenset[str]:
        """Return the candidates whose settings were changed; they compete with ``model="auto"`` in any
        case."""
        chain = self.learned is not None or (self.effort == "best" and rows >= FEWEST_CHAIN_ROWS)
        kernel = self._kernel != Kernel() or self.solver != "auto"
        return frozenset(name for name, asked in (("kernel", kernel), ("chain", chain)) if asked)

    def _check_settings(self) -> None:
        """Raise for settings that are wrong or exclude one another."""
        one_of("model", self.model, MODELS)
        one_of("effort", self.effort, EFFORTS)
        for name, record in (("learned", Learned), ("rows", Rows)):
            if not isinstance(getattr(self, name), record | None):
                raise TypeError(
                    f"{name} must be a {record.__name__} or None, got {shown(getattr(self, name))}."
                )
        if not isinstance(self.checkpoint, str | os.PathLike | None):
            raise TypeError(f"checkpoint must be a path or None, got {shown(self.checkpoint)}.")
        if self.model in ("chain", "mixture") and (self._kernel != Kernel() or self.solver != "auto"):
            raise ValueError(
                f"kernel and solver are settings of the kernel model, and model is {self.model!r}."
            )
        if self.model in ("kernel", "mixture") and self.learned is not None:
            raise ValueError(f"learned is a setting of the chain, and model is {self.model!r}.")
        if processes.place().size > 1 and not isinstance(self.random_state, int | np.integer):
            raise ValueError(
                f"several processes need the same integer random_state, got {shown(self.random_state)}."
            )

    # Fitting.

    def _source(
        self, X: Any, y: Any, sample_weight: ArrayLike | None, listener: Listener | None
    ) -> RowSource:
        """Return the rows of a fit."""
        self._check_settings()
        seed = seed_from(key_from(self._seed))
        options: Any = {"seed": seed, "report": listener, "conditional": self.conditional}
        source = RowSource.of(X, y, sample_weight, self.rows or Rows(), **options)
        if source.ends is not None and self.bounds is not None and not np.any(np.isnan(source.ends)):
            checked_bounds(self.bounds, source.ends)
        return source

    def _fit_model(
        self,
        targets: np.ndarray,
        X: np.ndarray,
        source: RowSource,
        listener: Listener | None,
        budget: TimeBudget | None,
    ) -> None:
        """Fit to targets under conditions, which may have width zero."""
        self._check_columns(targets, X)
        task = self._task(targets, X, source, listener)._replace(budget=budget)
        kernel, solver = self._kernel, solver_from(self.solver, conditional=self.conditional)
        kernel.check_widths(targets.shape[1], X.shape[1])
        chosen = candidates(task, self.model, kernel, solver, self._learned, asked=self._asked(len(targets)))
        asked = self.model != "auto" or bool(self._asked(len(targets)))
        self._compete(task, chosen, default=not asked)
        self.n_rows_ = len(targets) if source.rows is None else source.rows

    def _compete(self, task: Task, chosen: Sequence[Candidate], *, default: bool = False) -> None:
        """Fit the candidates and keep their stack, their scores and the held-out rows.

        A fit with ``default`` settings is replaced by a normal that scores higher."""
        stacked = compete(task._replace(compared=len(chosen) > 1), chosen)
        plain = plain_scores(task)
        if default:
            stacked = or_normal(task, stacked, plain)
        self.density_, self.candidates_ = stacked.density, stacked.scores
        held, weight = task.splits.held, task.sample.weight
        self._reference = Reference.of_fit(stacked.density, stacked.held_out, held, weight)
        stripped = lambda one: dataclasses.replace(one, density=None, held_out=None)
        self.fits_ = {name: stripped(one) for name, one in stacked.fitted.items()}
        self._part = task.splits.part
        mixture = stacked.fitted.get("mixture")
        if mixture is not None and mixture.held_out is not None:
            plain["mixture"] = mixture.held_out
        self._comparison = Comparison.of(stacked.held_out, plain, weight)

    def update(self, X: Any, y: Any = None, *, forget: float = 0.0) -> Self:
        """Go on from the fitted model with new rows, at a fraction of the cost of a fit to all rows.

        The members of the chain are trained further on the kept training rows and the new ones; units and
        orders of the columns stay. Old rows stay in the parts in which they were held out. ``forget`` is the
        share of the weight that old rows lose. Other candidates of the stack are fitted again."""
        check_is_fitted(self, "density_")
        parts = self.density_.parts if isinstance(self.density_, Stack) else (self.density_,)
        chain = next((part for part in parts if isinstance(part, ChainDensity)), None)
        if chain is None or self._part is None:
            raise ValueError("update is for models with a chain, and this one has none: fit it to all rows.")
        if not 0.0 <= forget < 1.0:
            raise ValueError(f"forget must be at least 0 and below 1, got {shown(forget)}.")
        targets, *conditions = self._scored_rows(X, y)
        seen = all(np.all(self._columns.inside(rows)) for rows in conditions)
        if not seen or not np.all(self._described.inside(targets)):
            raise ValueError("some new rows have unknown labels or lie outside the support: fit again.")
        with self._fitting() as listener:
            *inputs, known = self._training_columns()
            rows = np.concatenate([known, targets])
            below = np.concatenate([*inputs, *conditions]) if inputs else np.zeros((len(rows), 0))
            if self._weight is not None or forget:
                self._weight = np.append((1.0 - forget) * self.training_weight_, np.ones(len(targets)))
            self._continue(chain, rows, below, listener)
            self.n_rows_ += len(targets)
            self._training = below if self.conditional else self.density_.scaling.to_model(rows)
            if self.conditional:
                self._training_targets = rows
            self._keep_rows((self.rows or Rows()).kept)
        return self

    def _continue(
        self, chain: ChainDensity, targets: np.ndarray, X: np.ndarray, listener: Listener | None
    ) -> None:
        """Fit the candidates of the density again, the chain from its members and in its units."""
        task = self._task(targets, X, RowSource((), None), listener)
        part: Any = self._part
        new: Any = {"share": self._learned.held_out, "seed": task.keys.seed}
        # Trees are fitted anew, since they must not have seen the rows that they predict.
        inputs = dataclasses.replace(chain.inputs, trees=None)
        task = task._replace(
            scaling=chain.scaling,
            inputs=inputs,
            sample=Sample(chain.scaling.to_model(targets), inputs.to_model(X), self._weight),
            splits=Splits.extended(part, len(targets) - len(part), **new),
            checkpoint=None,
        )
        kernel, solver = self._kernel, solver_from(self.solver, conditional=self.conditional)
        parted = {one.name for one in self.candidates_ if one.weight > 0.0}
        chosen = candidates(task, self.model, kernel, solver, self._learned, asked=frozenset(parted))
        repeats = len(chain.members.order) // (part.max() + 1)
        warm = ChainCandidate(self._learned.continued(int(repeats)), chain.members)
        self._compete(task, [warm if one.name == "chain" else one for one in chosen if one.name in parted])

    def _task(self, targets: np.ndarray, X: np.ndarray, source: RowSource, listener: Listener | None) -> Task:
        """Return the task of the candidates."""
        keys = Keys(*keys_from(self._seed, len(Keys._fields)))
        kinds, weight, settings = self._described.kinds, self._weight, self._learned
        support = self._support(targets)
        if self.bounds is not None and support is not None:
            kinds = tuple(Bounded(*ends) for ends in support.T.tolist())
        scaling = Scaling.of(targets, kinds, weight=weight)
        inputs = self._columns.kinds if self.conditional else ()
        encoder = InputScaling.of(X, inputs, inputs=True, power=True, weight=weight)
        condition = encoder.to_model(X)
        shares: Any = {"parts": settings.parts(len(targets)), "share": settings.held_out, "seed": keys.seed}
        checkpoint = None if self.checkpoint is None else self._checkpoint
        return Task(
            targets,
            kinds,
            scaling,
            Sample(scaling.to_model(targets), condition, weight),
            Inputs.of(encoder, condition),
            Splits.draw(len(targets), **shares),
            keys,
            _is_numeric(targets, kinds),
            support,
            report=listener,
            checkpoint=checkpoint,
            mean_feature=source.mean_feature(self._detached()._read, listener),
        )

    def _checkpoint(self, name: str, fingerprint: Any) -> storage.Checkpoint:
        suffix = "" if name == "kernel" else f".{name}"
        return storage.Checkpoint(f"{self.checkpoint}{suffix}", fingerprint)

    def _support(self, targets: np.ndarray) -> np.ndarray | None:
        """Return the lower and upper ends of a box around all targets, shape (2, d), or None."""
        kinds = self._described.kinds
        if self.bounds is not None:
            if not self._described.plain or np.any(np.isnan(targets)):
                raise ValueError(
                    "bounds are for tables of real columns: use columns={...: 'bounded:0:1'} instead."
                )
            return checked_bounds(self.bounds, targets)
        if not all(kind.bounded for kind in kinds) or not _is_numeric(targets, kinds):
            return None
        return np.array([kind.ends for kind in kinds]).T

    def _check_columns(self, targets: np.ndarray, X: np.ndarray) -> None:
        """Raise for columns without a density; warn of columns that look like another kind."""
        described, codec = self._described, self._target_codec or self._codec
        wanted = self.get_params(deep=False).get("target_columns")
        wanted = kinds_of_targets(wanted) if self.conditional else self.columns
        # Columns with bounds are not doubted.
        codec.columns.hints(
            codec.restored(targets),
            wanted if self.bounds is None else dict.fromkeys(range(targets.shape[1]), "real"),
            setting="target_columns" if self.conditional else "columns",
        )
        complete = not np.any(np.isnan(X)) and not np.any(np.isnan(targets))
        if not (described.plain and self._columns.plain and complete):
            check_kinds(targets, described)
        elif self.conditional:
            check_targets(X, targets, self._names, self._target_names)
        else:
            remedy = 'leave one out, or carry it along with collinear="carry"'
            check_columns(targets, [str(name) for name in described.shown], remedy)

    def _keep_rows(self, most: int) -> None:
        """Keep at most ``most`` training rows for plots and the diagnosis.

        All rows are kept where the diagnosis needs them: a kernel model of p(y | x) has a normaliser per row,
        and a solver that chose the space of f left no mean of its features over all rows."""
        rows, kernel = len(self._training), self._kernel_fit
        needed = False
        if kernel is not None:
            problem = kernel.problem.within(kernel.solution.tilt.space)
            needed = kernel.problem.mean_feature is None or problem.mean_feature is None
        if rows <= most or needed:
            return
        # The splits permute the rows by the seed alone: their first rows are those that were held out.
        rng = np.random.default_rng((KEPT_ROWS, seed_from(key_from(self.random_state))))
        kept = np.sort(rng.permutation(rows)[:most])
        for name in ("_training", "_training_targets", "_weight", "_part"):
            if getattr(self, name, None) is not None:
                setattr(self, name, getattr(self, name)[kept])
        if kernel is not None:
            selection = eqx.tree_at(
                lambda found: found.held_out, kernel.selection, None, is_leaf=lambda x: x is None
            )
            details = KernelFit(kernel.problem.trimmed(kept), kernel.solution, selection)
            self.fits_ = self.fits_ | {"kernel": dataclasses.replace(self.fits_["kernel"], details=details)}

    def _detached(self) -> Self:
        """Return a copy without progress and checkpoint, for worker processes."""
        alone = copy.copy(self)
        alone.progress, alone.checkpoint = False, None
        return alone

    # Row blocks.

    def _blocks(self, X: Any, y: Any, weight: ArrayLike | None = None) -> RowBlocks | None:
        """Return a source of row blocks, or None if X is a table."""
        blocks = row_blocks(X, self.rows or Rows())
        return None if blocks is None else paired_blocks(blocks, y, weight, conditional=self.conditional)

    def _mean_score(self, blocks: RowBlocks, *, weighted: bool) -> float:
        with listening(self.progress) as listener:
            return mean_score(self._detached().score_samples, blocks, weighted=weighted, report=listener)

    @property
    def _effective_rows(self) -> float:
        # Rows that were not kept count like those that were.
        kept = len(self._training)
        return super()._effective_rows * (self.n_rows_ / kept if kept == (self.rows or Rows()).kept else 1.0)

    # Results of the fit.

    @property
    def _kernel_fit(self) -> KernelFit | None:
        """Return the record of the kernel model, if it has a part in the density."""
        part = any(one.name == "kernel" and one.weight > 0.0 for one in self.candidates_)
        return self.fits_["kernel"].details if part else None

    @property
    def _problem(self) -> Problem | None:
        return None if self._kernel_fit is None else self._kernel_fit.problem

    @property
    def solution_(self) -> Solution | None:
        """The solution of the kernel model: f, sampler, status and trace; None if it has no part in the
        density."""
        return None if self._kernel_fit is None else self._kernel_fit.solution

    @property
    def selection_(self) -> Selection | None:
        """The selected settings of the kernel model and all trials; None if no kernel model was fitted."""
        return self.fits_["kernel"].details.selection if "kernel" in self.fits_ else None

    @property
    def lengthscale_(self) -> np.ndarray | None:
        """The length scale of the target in the kernel model, or None."""
        return None if self._kernel_fit is None else self._kernel_fit.selection.settings.lengthscale

    @property
    def rkhs_penalty_(self) -> float | None:
        """The penalty of the kernel model, or None."""
        return None if self._kernel_fit is None else self._kernel_fit.selection.settings.rkhs_penalty

    @property
    def base_(self) -> AbstractMeasure | None:
        """The base measure of the kernel model, or None."""
        return None if self._kernel_fit is None else self._kernel_fit.selection.base

    @property
    def columns_(self) -> dict[str | int, AbstractKind]:
        """The kind of each column of X, by name or position."""
        return self._codec.columns.shown

    @property
    def target_columns_(self) -> dict[str | int, AbstractKind]:
        """The kind of each column of y, by name or position; empty for p(x)."""
        return {} if self._target_codec is None else self._target_codec.columns.shown

    @property
    def steps_(self) -> dict[str | int, float]:
        """The step of each column of the density that holds rounded numbers, by name or position."""
        return (self._target_codec or self._codec).columns.steps

    def _log_density(self, density: Any, targets: np.ndarray, *X: np.ndarray) -> np.ndarray:
        """Return log densities; -inf outside the support. Missing cells of columns in which they are rare are
        integrated out."""
        inside, found = self._described.inside(targets), np.full(len(targets), -np.inf)
        scaling = density.scaling
        # Files of older versions store which columns had gaps, and learned all of them.
        rare = scaling.rare or tuple(not gap for gap in scaling.gaps) or (True,) * targets.shape[1]
        if not X and np.any(gaps := np.isnan(targets[:, np.array(rare)]).any(axis=1)):
            found[inside & gaps] = log_evidence(density, targets[inside & gaps], GAP_DRAWS, key=key_from(0))
            inside &= ~gaps
            if not np.any(inside):
                return found
        found[inside] = scores(density, targets[inside], *(part[inside] for part in X))
        return found

    def _diagnosed(self, calibration: list[Measurement], settings: Judgement, key: RandomKey) -> Diagnosis:
        fit, (trained, neighbours) = self._kernel_fit, self._training_scores(key)
        found = Evidence(
            density=self.density_,
            training=self._training,
            weight=self._weight,
            candidates=self.candidates_,
            status={"kernel": fit.solution.status} if fit is not None else {},
            facts={name: one.facts for name, one in self.fits_.items()},
            certify=None if fit is None else partial(certified, fit.problem),
            calibration=calibration,
            comparison=self._held_out_comparison(key),
            training_score=trained,
            neighbour_scores=neighbours,
            settings=settings,
            key=key,
        )
        return diagnose(found)

    def _held_out_comparison(self, key: Key[Array, ""]) -> Comparison | None:
        """Return the comparison with plain densities; a kernel model of given settings is cross-validated."""
        found, fit = self._comparison, self._kernel_fit
        if found is None or found.score is not None or fit is None:
            return found
        *_, targets = self._training_columns()
        scaling = self.density_.scaling
        scores = cross_validated(fit, scaling.to_model(targets), key=key)
        if scores is None:
            return found
        seen, scores = ~np.isnan(scores) & self._compared, scores + scaling.log_jacobian(targets)
        return found._replace(score=float(weighted_mean(scores[seen], part_of(self._weight, seen))))

    @property
    def _compared(self) -> np.ndarray:
        """Return which training rows were held out, all if none was: plain densities have scored these."""
        held = np.zeros(0, bool) if self._part is None else self._part >= 0
        return held if np.any(held) else np.ones(len(self._training), bool)

    def _training_scores(self, key: Key[Array, ""]) -> tuple[float, tuple[float, float] | None]:
        """Return mean log densities of at most a thousand rows: of those compared, and of all training rows
        and the points half-way to their nearest neighbours, None under conditions and for columns that are
        not real."""
        rows = np.random.default_rng(seed_from(key)).permutation(len(self._training))
        rows, compared = rows[:MOST_SCORED], rows[self._compared[rows]][:MOST_SCORED]
        *X, targets = self._training_columns()
        mean = lambda scores, rows: float(weighted_mean(scores, part_of(self._weight, rows)))
        own = self._log_density(self.density_, targets[compared], *(part[compared] for part in X))
        if self.conditional or not _is_numeric(targets, self._described.kinds):
            return mean(own, compared), None
        z, scaling = self.density_.scaling.to_model(targets), self.density_.scaling
        half_way = scaling.to_data(0.5 * (z[rows] + z[nearest_other(z, rows)]))
        both = [self._log_density(self.density_, points) for points in (targets[rows], half_way)]
        return mean(own, compared), (mean(both[0], rows), mean(both[1], rows))


def _is_numeric(targets: np.ndarray, kinds: tuple[AbstractKind, ...]) -> bool:
    """Return whether all targets are complete real numbers, on the line, on the half-line or in one finite
    box."""
    bounded = [kind for kind in kinds if kind.bounded]
    box = len(bounded) in (0, len(kinds)) and all(np.all(np.isfinite(kind.ends)) for kind in bounded)
    return all(kind.has_kernel for kind in kinds) and box and not np.any(np.isnan(targets))


def checked_bounds(bounds: Any, targets: np.ndarray) -> np.ndarray:
    """Return the bounds with shape (2, d), or raise if they are malformed or exclude some targets."""
    try:
        ends = np.stack([np.broadcast_to(np.asarray(side, float), (targets.shape[1],)) for side in bounds])
        low, high = ends
    except (TypeError, ValueError):
        sizes = f"a number or one number per column ({targets.shape[1]})"
        raise ValueError(f"bounds must be a pair, each {sizes}; got {shown(bounds)}.") from None
    if not np.all(np.isfinite(ends)) or not np.all(low < high):
        raise ValueError(
            f"bounds must be finite, the lower below the upper one, in every column; got {shown(bounds)}."
        )
    if np.any((targets < low) | (targets > high)):
        raise ValueError("some rows lie outside the bounds: widen them, or remove these rows.")
    return ends
