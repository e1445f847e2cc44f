"""Kernel exponential families: densities, samplers and verdicts from data."""

from kexpfam.diagnostics import ConditionalDiagnosis as ConditionalDiagnosis
from kexpfam.diagnostics import Diagnosis as Diagnosis
from kexpfam.estimators import ConditionalKernelExpFamily as ConditionalKernelExpFamily
from kexpfam.estimators import KernelExpFamily as KernelExpFamily
from kexpfam.partition import Estimate as Estimate
from kexpfam.registry import load as load
from kexpfam.solvers.annealed import AnnealedLikelihood as AnnealedLikelihood
from kexpfam.solvers.contrastive import ContrastiveDivergence as ContrastiveDivergence
from kexpfam.solvers.dde import DDE as DDE
from kexpfam.solvers.doubly_dual import DoublyDual as DoublyDual
from kexpfam.solvers.exact import Exact as Exact
from kexpfam.solvers.functional import Ascent as Ascent
from kexpfam.solvers.functional import FunctionalGradient as FunctionalGradient
from kexpfam.solvers.iterates import Averaged as Averaged
from kexpfam.solvers.iterates import RandomIterate as RandomIterate
from kexpfam.solvers.learned_features import AdaptedFeatures as AdaptedFeatures
from kexpfam.solvers.learned_features import DeepNetwork as DeepNetwork
from kexpfam.solvers.mmd_gan import MMDGAN as MMDGAN
from kexpfam.solvers.moment_matching import MomentMatching as MomentMatching
from kexpfam.solvers.random_features import RandomFeatureGradient as RandomFeatureGradient
from kexpfam.solvers.singly_dual import SinglyDual as SinglyDual
from kexpfam.version import __version__ as __version__
