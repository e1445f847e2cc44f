"""The learned chain as a candidate: an ensemble of masked networks, each column given the ones before it."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kexpfam.data.sample import Sample
from kexpfam.fit.learned import Learned, learn, tilted_columns
from kexpfam.fit.task import Candidate, Fitted, Task
from kexpfam.fit.trees import boosted
from kexpfam.model.chain import Chain
from kexpfam.model.density import Inputs
from kexpfam.model.ensemble import ChainDensity, Pool

__all__ = ["ChainCandidate"]


class ChainCandidate(Candidate):
    """An ensemble of chains, trained with these settings, from the members ``start`` if there are any."""

    name: ClassVar[str] = "chain"

    def __init__(self, settings: Learned, start: Chain | None = None):
        self.settings, self.start = settings, start

    def refusal(self, task: Task) -> str | None:
        return None

    def fit(self, task: Task, earlier: Mapping[str, Fitted]) -> Fitted:
        sample, inputs = self._with_trees(task)
        ensemble = learn(
            sample,
            self.settings,
            task.scaling,
            key=task.keys.chain,
            held=task.splits.held,
            trees=sample.condition.shape[1] - task.sample.condition.shape[1],
            start=self.start,
            report=task.report,
            budget=task.budget,
            checkpoint=task.checkpoint_for("chain", (sample, self.settings, task.scaling)),
        )
        pooled = Pool.suits(ensemble.chain.columns)
        density = ChainDensity(ensemble.chain, task.scaling, inputs, pooled=pooled, power=ensemble.power)
        return Fitted(density, ensemble.held_out + task.log_jacobian, ensemble.status, {}, ensemble.trace)

    def _with_trees(self, task: Task) -> tuple[Sample, Inputs]:
        """Return the sample and the inputs with predictions by trees, if those explain the targets."""
        settings, target = self.settings.boosting, np.asarray(task.sample.target)
        numeric = [j for j in tilted_columns(task.scaling) if np.isfinite(target[:, j]).all()]
        views, used = self.settings.repeated_views(trees=True), False
        if self.start is None:
            used = task.dim <= settings.targets and any("trees" in view for view in views)
        elif self.start.sees is not None:
            # Members that use trees need them again.
            used, settings = True, dataclasses.replace(settings, explained=-np.inf)
        if not (task.conditional and used and numeric):
            return task.sample, task.inputs
        found = boosted(task.sample, numeric, task.splits.folds, settings, seed=task.keys.seed)
        if found is None:
            return task.sample, task.inputs
        condition = np.concatenate([task.sample.condition, found.held_out], axis=1)
        sample = Sample(task.sample.target, condition, task.sample.weight)
        return sample, dataclasses.replace(task.inputs, trees=found.trees)
