"""The one place where a name in a spec becomes an estimator."""

import functools
from collections.abc import Callable

from kexpfam.baselines import (
    ConditionalKernelDensity,
    ConditionalScoreMatching,
    GaussianMixtureDensity,
    KernelDensity,
    LeastSquaresConditional,
    NeighbourDensity,
    ScoreMatchingExpFamily,
    SplineFlow,
)
from kexpfam.estimators import ConditionalKernelExpFamily, KernelExpFamily
from kexpfam.experiments.competitors import ForestWithResiduals, LinearGaussian
from kexpfam.solvers.annealed import AnnealedLikelihood
from kexpfam.solvers.contrastive import ContrastiveDivergence
from kexpfam.solvers.dde import DDE, STARTS
from kexpfam.solvers.exact import Exact
from kexpfam.solvers.functional import FunctionalGradient
from kexpfam.solvers.iterates import Averaged, RandomIterate
from kexpfam.solvers.learned_features import AdaptedFeatures, DeepNetwork
from kexpfam.solvers.mmd_gan import MMDGAN
from kexpfam.solvers.moment_matching import MomentMatching
from kexpfam.solvers.random_features import RandomFeatureGradient
from kexpfam.solvers.singly_dual import SinglyDual

WARM = STARTS["warm"]

DENSITIES: dict[str, Callable] = {
    "dde": lambda seed: KernelExpFamily(random_state=seed),
    "exact": lambda seed: KernelExpFamily(solver="exact", random_state=seed),
    "score matching": lambda seed: ScoreMatchingExpFamily(random_state=seed),
    "score matching, normal base": lambda seed: ScoreMatchingExpFamily(base="gaussian", random_state=seed),
    "kde": lambda seed: KernelDensity(random_state=seed),
    "mixture": lambda seed: GaussianMixtureDensity(random_state=seed),
    "spline flow": lambda seed: SplineFlow(random_state=seed),
}
# Every algorithm of the paper, with its default settings; the estimator selects length scale and penalty alike for all.
ALGORITHMS: dict[str, Callable] = {
    "exact": Exact,
    "doubly dual (dde)": DDE,
    "doubly dual, averaged iterate": lambda: DDE(saddle=Averaged(WARM)),
    "doubly dual, random iterate": lambda: DDE(saddle=RandomIterate(WARM)),
    "functional gradients": FunctionalGradient,
    "random features": RandomFeatureGradient,
    "adapted features": AdaptedFeatures,
    "deep network": DeepNetwork,
    "singly dual, particles": lambda: SinglyDual(family="particles"),
    "singly dual, Gaussian": lambda: SinglyDual(family="gaussian"),
    "singly dual, mixture": lambda: SinglyDual(family="mixture"),
    "singly dual, flow": lambda: SinglyDual(family="flow"),
    "singly dual, dynamics": lambda: SinglyDual(family="dynamics"),
    "MMD GAN": MMDGAN,
    "contrastive divergence, persistent": ContrastiveDivergence,
    "contrastive divergence, short runs": lambda: ContrastiveDivergence(persistent=False),
    "annealed importance sampling": AnnealedLikelihood,
    "moment matching": MomentMatching,
}
# Families of dual distributions, with f as the saddle point leaves it: a polish would hide what the family costs.
DUALS: dict[str, Callable] = {
    family: functools.partial(SinglyDual, family=family, polish=False)
    for family in ("gaussian", "particles", "mixture", "flow", "dynamics")
}


def with_solver(solver, seed: int) -> KernelExpFamily:
    """Return the default estimator with another solver."""
    return KernelExpFamily(solver=solver, random_state=seed)


CONDITIONALS: dict[str, Callable] = {
    "dde": lambda seed: ConditionalKernelExpFamily(random_state=seed),
    "exact": lambda seed: ConditionalKernelExpFamily(solver="exact", random_state=seed),
    "kcef": lambda seed: ConditionalScoreMatching(random_state=seed),
    "epsilon-kde": lambda seed: NeighbourDensity(random_state=seed),
    "lscde": lambda seed: LeastSquaresConditional(random_state=seed),
    "conditional kde": lambda seed: ConditionalKernelDensity(random_state=seed),
    "linear": lambda seed: LinearGaussian(),
    "forest": ForestWithResiduals,
}
# With length scale and penalty given, so that the solution is timed and not the search for settings.
GIVEN = {"base": "gaussian", "lengthscale": 1.0, "rkhs_penalty": 1e-3, "normaliser": "importance"}
COSTED: dict[str, Callable] = {
    "dde": lambda seed: KernelExpFamily(**GIVEN, random_state=seed),
    "score matching, full": lambda seed: ScoreMatchingExpFamily(variant="full", **GIVEN, random_state=seed),
    "score matching, nystrom": lambda seed: ScoreMatchingExpFamily(variant="nystrom", **GIVEN, random_state=seed),
}
