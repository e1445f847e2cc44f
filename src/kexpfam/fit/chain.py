"""The learned chain as a candidate: an ensemble of masked networks, each column given the ones before it."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from kexpfam.data.sample import Sample
from kexpfam.data.units import Units
from kexpfam.fit.learned import Learned, learn
from kexpfam.fit.task import Candidate, Fitted, Task
from kexpfam.model.ensemble import LearnedDensity, MixedDensity
from kexpfam.model.mixed import Wiring

__all__ = ["ChainCandidate"]


class ChainCandidate(Candidate):
    """An ensemble of chains, trained with these settings."""

    name: ClassVar[str] = "chain"

    def __init__(self, settings: Learned):
        self.settings = settings

    def refusal(self, task: Task) -> str | None:
        return None

    def fit(self, task: Task, earlier: Mapping[str, Fitted]) -> Fitted:
        values, weight = task.values, task.sample.weight
        wired, support, warped, wiring = not task.numeric or any(task.scaling.logs), None, None, None
        scaling = Units.of(values, task.kinds, weight=weight) if wired else task.scaling
        sample = Sample(scaling.to_model(values), task.sample.condition, weight)
        if isinstance(scaling, Units):
            wiring = Wiring.of(scaling, sample.target)
        else:
            warped = np.array(scaling.warped) if any(scaling.warped) else None
            support = None if task.support is None else scaling.to_model(task.support)
        place = task.checkpoint_for("chain", (sample, self.settings, support, wiring))
        known: Any = {"support": support, "warped": warped, "wiring": wiring, "held": task.splits.held}
        ensemble = learn(
            sample, self.settings, key=task.keys.chain, **known, report=task.report, checkpoint=place
        )
        made: Any = MixedDensity if wired else LearnedDensity
        density = made(ensemble.chain, scaling, task.inputs)
        held_out = ensemble.held_out + scaling.log_jacobian(values)
        facts = (
            {}
            if ensemble.polish is None
            else {"polish_gain": ensemble.polish.gain, "polish_gap": ensemble.polish.gap}
        )
        return Fitted(density, held_out, ensemble.status, facts, ensemble.trace, ensemble.polish)
