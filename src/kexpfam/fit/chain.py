"""The learned chain as a candidate: an ensemble of masked networks, each column given the ones before it."""

from collections.abc import Mapping
from typing import ClassVar

from kexpfam.fit.learned import Learned, learn
from kexpfam.fit.task import Candidate, Fitted, Task
from kexpfam.model.chain import Chain
from kexpfam.model.ensemble import ChainDensity

__all__ = ["ChainCandidate"]


class ChainCandidate(Candidate):
    """An ensemble of chains, trained with these settings, from the members ``start`` if there are any."""

    name: ClassVar[str] = "chain"

    def __init__(self, settings: Learned, start: Chain | None = None):
        self.settings, self.start = settings, start

    def refusal(self, task: Task) -> str | None:
        return None

    def fit(self, task: Task, earlier: Mapping[str, Fitted]) -> Fitted:
        ensemble = learn(
            task.sample,
            self.settings,
            task.scaling,
            key=task.keys.chain,
            held=task.splits.held,
            start=self.start,
            report=task.report,
            budget=task.budget,
            checkpoint=task.checkpoint_for("chain", (task.sample, self.settings, task.scaling)),
        )
        density = ChainDensity(ensemble.chain, task.scaling, task.inputs)
        polish = ensemble.polish
        facts = {} if polish is None else {"polish_gain": polish.gain, "polish_gap": polish.gap}
        held_out = ensemble.held_out + task.log_jacobian
        return Fitted(density, held_out, ensemble.status, facts, ensemble.trace, polish)
