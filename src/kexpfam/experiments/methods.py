"""The one place where a name in a spec becomes an estimator."""

from collections.abc import Callable

from kexpfam.baselines.conditional_mixtures import ConditionalKernelDensity, LeastSquaresConditional, NeighbourDensity
from kexpfam.baselines.flow import SplineFlow
from kexpfam.baselines.gaussian_mixture import GaussianMixtureDensity
from kexpfam.baselines.kernel_density import KernelDensity
from kexpfam.estimators import ConditionalKernelExpFamily, KernelExpFamily
from kexpfam.experiments.competitors import ForestWithResiduals, LinearGaussian

DENSITIES: dict[str, Callable] = {
    "dde": lambda seed: KernelExpFamily(random_state=seed),
    "exact": lambda seed: KernelExpFamily(solver="exact", random_state=seed),
    "kde": lambda seed: KernelDensity(random_state=seed),
    "mixture": lambda seed: GaussianMixtureDensity(random_state=seed),
    "spline flow": lambda seed: SplineFlow(random_state=seed),
}
CONDITIONALS: dict[str, Callable] = {
    "dde": lambda seed: ConditionalKernelExpFamily(random_state=seed),
    "exact": lambda seed: ConditionalKernelExpFamily(solver="exact", random_state=seed),
    "epsilon-kde": lambda seed: NeighbourDensity(random_state=seed),
    "lscde": lambda seed: LeastSquaresConditional(random_state=seed),
    "conditional kde": lambda seed: ConditionalKernelDensity(random_state=seed),
    "linear": lambda seed: LinearGaussian(),
    "forest": ForestWithResiduals,
}
# With length scale and penalty given, so that the solution is timed and not the search for settings.
COSTED: dict[str, Callable] = {
    "dde": lambda seed: KernelExpFamily(lengthscale=1.0, rkhs_penalty=1e-3, base="gaussian", random_state=seed),
}
