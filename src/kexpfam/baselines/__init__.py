"""The estimators that the paper compares with, and others of the field, behind the library's own face."""

from kexpfam.baselines.conditional_mixtures import ConditionalKernelDensity as ConditionalKernelDensity
from kexpfam.baselines.conditional_mixtures import LeastSquaresConditional as LeastSquaresConditional
from kexpfam.baselines.conditional_mixtures import NeighbourDensity as NeighbourDensity
from kexpfam.baselines.conditional_score_matching import ConditionalScoreMatching as ConditionalScoreMatching
from kexpfam.baselines.flow import SplineFlow as SplineFlow
from kexpfam.baselines.gaussian_mixture import GaussianMixtureDensity as GaussianMixtureDensity
from kexpfam.baselines.kernel_density import KernelDensity as KernelDensity
from kexpfam.baselines.score_matching import ScoreMatchingExpFamily as ScoreMatchingExpFamily
