"""The one place where a name in a spec becomes an estimator or a solver."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from kexpfam import Kernel, Learned
from kexpfam.estimators.kernel_exp_family import KernelExpFamily
from kexpfam.fit.dde import DDE
from kexpfam.fit.problem import Solver, solver_from
from kexpfam.fit.saddle import DoublyDual

__all__ = [
    "ALGORITHMS",
    "CONDITIONALS",
    "COSTED",
    "DENSITIES",
    "DUALS",
    "LABELS",
    "OPTIONS",
    "SPACES",
    "Method",
    "options_of",
    "parted",
    "solver_named",
    "with_solver",
]

LIBRARY, OURS, PEERS = "kexpfam.estimators", "reproduction.competitors", "reproduction.peers"


@dataclasses.dataclass(frozen=True)
class Method:
    """An estimator and its non-default settings; as a string, the constructor call."""

    estimator: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    module: str = LIBRARY

    def __call__(self, seed: int) -> Any:
        return getattr(importlib.import_module(self.module), self.estimator)(
            **self.settings, random_state=seed
        )

    def __str__(self) -> str:
        return f"{self.estimator}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


DENSITIES: dict[str, Method] = {
    "auto": Method("KernelExpFamily"),
    "dde": Method("KernelExpFamily", {"model": "kernel", "solver": "dde"}),
    "exact": Method("KernelExpFamily", {"model": "kernel", "solver": "exact"}),
    "score matching": Method("ScoreMatchingExpFamily"),
    "score matching, normal base": Method("ScoreMatchingExpFamily", {"base": "gaussian"}),
    "kde": Method("KernelDensity"),
    "mixture": Method("GaussianMixtureDensity"),
    "spline flow": Method("SplineFlow"),
    "sklearn mixture": Method("HeldOutMixture", module=OURS),
    "vine": Method("KernelVine", module=PEERS),
    "mixed kde": Method("MixedKernelDensity", module=PEERS),
}
CONDITIONALS: dict[str, Method] = {
    "auto": Method("ConditionalKernelExpFamily"),
    "dde": Method("ConditionalKernelExpFamily", {"model": "kernel", "solver": "dde"}),
    "exact": Method("ConditionalKernelExpFamily", {"model": "kernel", "solver": "exact"}),
    # Parts of the default: the inputs as they are, their piecewise-linear encoding, and both with trees.
    "plain inputs": Method("ConditionalKernelExpFamily", {"learned": Learned(views=("plain",))}),
    "encoded inputs": Method("ConditionalKernelExpFamily", {"learned": Learned(views=("encoded",))}),
    "inputs and trees": Method("ConditionalKernelExpFamily", {"learned": Learned(views=("plain+trees",))}),
    "trees alone": Method("BoostedNormal", module=OURS),
    "kcef": Method("ConditionalScoreMatching"),
    "epsilon-kde": Method("NeighbourDensity"),
    "lscde": Method("LeastSquaresConditional"),
    "conditional kde": Method("ConditionalKernelDensity"),
    "linear": Method("LinearGaussian", module=OURS),
    "forest": Method("ForestWithResiduals", module=OURS),
    "ngboost": Method("NGBoostNormal", module=PEERS),
    "quantile forest": Method("SmoothedQuantileForest", module=PEERS),
    "treeffuser": Method("TreeffuserProcess", module=PEERS),
}
# With length scale and penalty given, so that the solution is timed and not the search for settings.
GIVEN: dict[str, Any] = {
    "base": "gaussian",
    "lengthscale": 1.0,
    "rkhs_penalty": 1e-3,
    "normaliser": "importance",
}
OF_KERNEL = {"model": "kernel", "kernel": Kernel(**GIVEN)}
COSTED: dict[str, Method] = {
    "auto": Method("KernelExpFamily", OF_KERNEL),
    "dde": Method("KernelExpFamily", OF_KERNEL | {"solver": "dde"}),
    "score matching, full": Method(
        "ScoreMatchingExpFamily", GIVEN | {"variant": "full", "max_equations": 20_000}
    ),
    "score matching, nystrom": Method("ScoreMatchingExpFamily", GIVEN | {"variant": "nystrom"}),
    "kcef": Method(
        "ConditionalScoreMatching", {"lengthscale": 1.0, "condition_lengthscale": 1.0, "rkhs_penalty": 1e-3}
    ),
}
# Settings of spaces of f other than that of the Gaussian kernel at centres.
SPACES: dict[str, Kernel] = {
    "matern52": Kernel("matern52"),
    "random features": Kernel(space="random_features"),
}
# Displayed names of methods; the default is the name in the specs.
LABELS = {
    "auto": "auto (default)",
    "dde": "DDE alone",
    "kde": "KDE",
    "kcef": "KCEF",
    "lscde": "LSCDE",
    "epsilon-kde": "ε-KDE",
    "ngboost": "NGBoost",
}


def named(name: str) -> Callable[..., Solver]:
    """Return the maker of a registered solver: it takes the options that are switched on."""
    return lambda **options: dataclasses.replace(solver_from(name, conditional=False), **options)


def of_the_paper(name: str, **settings: Any) -> Callable[..., Solver]:
    """Return the maker of a solver of ``kexpfam.paper`` with other settings than its own."""
    return lambda **options: getattr(importlib.import_module("kexpfam.paper"), name)(**settings, **options)


def iterate_of_dde(name: str) -> Callable[..., Solver]:
    """Return the maker of a DDE whose answer is another iterate than the last."""

    def make(*, warm_start: bool = False, polish: bool = False) -> Solver:
        wrapper = getattr(importlib.import_module("kexpfam.paper"), name)
        return DDE(
            saddle=wrapper(DoublyDual.warm() if warm_start else DoublyDual()),
            warm_start=warm_start,
            polish=polish,
        )

    return make


# Every algorithm of the paper on its own: cold start, no polish. Length scale and penalty are selected alike
# for all.
ALGORITHMS: dict[str, Callable[..., Solver]] = {
    "auto": named("auto"),
    "exact": named("exact"),
    "dde": named("dde"),
    "dde, averaged iterate": iterate_of_dde("Averaged"),
    "dde, random iterate": iterate_of_dde("RandomIterate"),
    "functional gradients": named("functional"),
    "random features": named("random_features"),
    "adapted features": named("adapted"),
    "deep network": named("deep"),
    "singly dual, particles": of_the_paper("SinglyDual", family="particles"),
    "singly dual, Gaussian": of_the_paper("SinglyDual", family="gaussian"),
    "singly dual, mixture": of_the_paper("SinglyDual", family="mixture"),
    "singly dual, flow": of_the_paper("SinglyDual", family="flow"),
    "singly dual, dynamics": of_the_paper("SinglyDual", family="dynamics"),
    "MMD GAN": named("mmd_gan"),
    "contrastive divergence, persistent": named("contrastive"),
    "contrastive divergence, short runs": of_the_paper("ContrastiveDivergence", persistent=False),
    "annealed importance sampling": named("annealed"),
    "moment matching": named("moment_matching"),
}
# Families of dual distributions, without a polish, which would hide the approximation error.
DUALS: dict[str, Callable[..., Solver]] = {
    family: of_the_paper("SinglyDual", family=family)
    for family in ("gaussian", "particles", "mixture", "flow", "dynamics")
}
# Options that are not in the paper: "NAME + warm start", "NAME + polish".
OPTIONS = {"warm start": "warm_start", "polish": "polish"}


def parted(method: str) -> tuple[str, str]:
    """Return algorithm and option of a name such as "dde + polish"; without an option, the option is ""."""
    name, _, option = method.partition(" + ")
    return name, option


def options_of(algorithm: str) -> list[str]:
    """Return the options that an algorithm has."""
    fields = {field.name for field in dataclasses.fields(ALGORITHMS[algorithm]())}
    return [option for option, field in OPTIONS.items() if field in fields]


def solver_named(method: str) -> Solver:
    """Return the algorithm of that name, with the option that its name asks for."""
    name, option = parted(method)
    return ALGORITHMS[name](**({OPTIONS[option]: True} if option else {}))


def with_solver(solver: Solver, seed: int) -> KernelExpFamily:
    """Return the default estimator with another solver."""
    return KernelExpFamily(model="kernel", solver=solver, random_state=seed)
