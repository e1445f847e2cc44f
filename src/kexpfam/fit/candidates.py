"""The registry of candidates, and which of them compete for a task."""

from kexpfam.fit.chain import ChainCandidate
from kexpfam.fit.kernel import KernelCandidate
from kexpfam.fit.learned import Learned
from kexpfam.fit.mixture import MixtureCandidate
from kexpfam.fit.problem import Solver
from kexpfam.fit.select import FEW_DIMS, Kernel
from kexpfam.fit.task import Candidate, Task

# Candidates in the order in which they are fitted.
CANDIDATES: dict[str, type[Candidate]] = {
    one.name: one for one in (MixtureCandidate, KernelCandidate, ChainCandidate)
}
MODELS = ("auto", *CANDIDATES)
# Beyond this number of rows a chain of p(y | x) has always been better than a kernel model, and faster.
MOST_CONDITIONAL_ROWS = 400
# The least number of rows of a chain.
FEWEST_CHAIN_ROWS = 100


def candidates(
    task: Task,
    model: str,
    kernel: Kernel,
    solver: Solver,
    learned: Learned,
    *,
    asked: frozenset[str] = frozenset(),
) -> list[Candidate]:
    """Return the candidates of a fit, or raise if one of them cannot be fitted to the task.

    With ``model="auto"`` the data decide, and the candidates in ``asked``, whose settings were changed,
    always compete."""
    every: dict[str, Candidate] = {
        "mixture": MixtureCandidate(),
        "kernel": KernelCandidate(kernel, solver),
        "chain": ChainCandidate(learned),
    }
    names = {model}
    if model == "auto":
        names = (_by_data(task) if every["kernel"].refusal(task) is None else {"chain"}) | asked
    chosen = [one for name, one in every.items() if name in names]
    for one in chosen:
        if reason := one.refusal(task):
            raise ValueError(reason)
    return chosen


def _by_data(task: Task) -> set[str]:
    """Return the names of the candidates by the number of rows and columns."""
    rows = task.sample.effective_rows
    few = not task.conditional and task.dim <= FEW_DIMS
    if few or rows < FEWEST_CHAIN_ROWS:
        return {"kernel"}
    if task.conditional:
        return {"kernel", "chain"} if task.dim == 1 and rows <= MOST_CONDITIONAL_ROWS else {"chain"}
    return {"chain"} if task.support is not None else {"mixture", "kernel", "chain"}
