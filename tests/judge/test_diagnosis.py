"""The verdict: what is measured about a sampler, and which words go with which numbers."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import normal, tilted_normal, tilted_normal_log_partition

from kexpfam.data.scaling import Scaling
from kexpfam.fit.problem import Status
from kexpfam.judge.calibration import Calibration
from kexpfam.judge.diagnosis import PASS_ROWS, Diagnosis, Judgement, SamplerFit, judge, sampler_fit
from kexpfam.judge.stacking import diagnose_stack
from kexpfam.model.density import Estimate, Inputs, Sampler, TiltedDensity, WeightedDraws
from kexpfam.model.ensemble import LawDensity
from kexpfam.model.measures import Gaussian
from kexpfam.model.networks import AbstractTransport, Identity

SURE = Estimate(0.0, 0.001, 1e4)
NOTHING = np.zeros((50, 0))


class Fold(AbstractTransport):
    """``|noise|``: two points of noise for every point, so that space is folded."""

    def __call__(self, noise, condition):
        return jnp.abs(noise)


def density(sampler: Sampler, slope: float = 0.5) -> TiltedDensity:
    """Return N(slope, 1) as a tilted standard normal."""
    plain = Scaling(*(np.full(1, value) for value in (0.0, 1.0, 0.0, 1.0, 1.0)), warped=(False,))
    inputs = Inputs.of(Scaling.plain(np.zeros((1, 0))), np.zeros((1, 0)))
    log_partition = Estimate(tilted_normal_log_partition(slope), 0.0, np.inf)
    return TiltedDensity(tilted_normal(slope), sampler, plain, inputs, log_partition, None, None, None)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mean", [0.5, 0.9, 1.5])
def test_the_divergence_of_a_normal_sampler_has_the_closed_form(mean, seed):
    fit = sampler_fit(density(Sampler(normal(mean), Identity(), normal())), NOTHING, 4000, key=jr.key(seed))
    assert abs(fit.kl.value - 0.5 * (mean - 0.5) ** 2) < 4 * fit.kl.standard_error + 1e-9
    # The effective share of weights between two normals of variance 1 is exp(-shift^2).
    assert fit.share == pytest.approx(np.exp(-((mean - 0.5) ** 2)), abs=0.1)
    assert not fit.draws.folds


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_divergence_of_a_map_that_folds_space_is_that_of_its_law(seed):
    sampler = Sampler(normal(), Fold(), normal())
    assert sampler.weighted_draws(np.zeros((500, 0)), key=jr.key(seed)).folds
    fit = sampler_fit(density(sampler, slope=0.0), NOTHING, 4000, key=jr.key(seed))
    assert not fit.draws.folds
    # Half a normal has twice its density; the neighbours' own error is about 1 / sqrt(8) at each point.
    assert abs(fit.kl.value - np.log(2.0)) < 5 * fit.kl.standard_error + 0.01


def fitted(kl=0.0, share=1.0) -> SamplerFit:
    return SamplerFit(
        Estimate(kl, 0.01, 1e3), share, WeightedDraws(np.zeros((1, 1)), np.zeros(1), folds=False), NOTHING
    )


def verdict(
    *, log_partition=SURE, f_gap=0.0, status=Status.CONVERGED, settings=None, **fit
) -> tuple[str, tuple[str, ...]]:
    return judge(
        status, log_partition, f_gap, fitted(**fit), None, conditional=False, settings=settings or Judgement()
    )


CASES = {
    "all is well": ({}, "good", None),
    "f a little off": ({"f_gap": 0.05}, "fair", "f is not at its optimum"),
    "f far off": ({"f_gap": 0.2}, "poor", "f is not at its optimum"),
    "sampler a little off": ({"kl": 0.2}, "fair", "differs from the density"),
    "sampler far off": ({"kl": 0.6}, "poor", "differs from the density"),
    "few effective draws": ({"share": 0.2}, "fair", "differs from the density"),
    "hardly any effective draws": ({"share": 0.05}, "poor", "differs from the density"),
    "uncertain constant": ({"log_partition": Estimate(0.0, 1.0, 1e4)}, "poor", "log Z is uncertain"),
    "stopped early": ({"status": Status.RAN_ALL_STEPS}, "fair", "All steps ran"),
}


@pytest.mark.parametrize(("facts", "expected", "advice"), CASES.values(), ids=CASES)
def test_the_verdict_goes_with_the_numbers(facts, expected, advice):
    found, said = verdict(**facts)
    assert found == expected
    assert said == () if advice is None else any(advice in line for line in said)


def test_a_judge_s_thresholds_are_settings():
    assert verdict(kl=0.2, settings=Judgement(good_sampler_kl=0.3))[0] == "good"
    assert verdict(kl=0.2, settings=Judgement(good_sampler_kl=0.05, poor=2.0))[0] == "poor"


def test_settings_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="draws must be at least 10"):
        Judgement(draws=1)


def test_a_normal_base_is_its_own_best_sampler():
    law = Gaussian(np.zeros(1), np.eye(1))
    fit = sampler_fit(density(Sampler(law, Identity(), law), slope=0.0), NOTHING, 500, key=jr.key(0))
    assert fit.kl.value == pytest.approx(0.0, abs=1e-9)
    assert fit.share == pytest.approx(1.0)


class Conditional(LawDensity):
    """A law that says it has a condition: all that the diagnosis of a stack asks of it."""

    @property
    def conditional(self):
        return True


def test_rows_that_were_passed_are_not_asked_for_again():
    # The parts of a stack are judged without the rows, and ask for them.
    law = Conditional(Gaussian(np.zeros(1), np.eye(1)), Scaling.plain(np.zeros((5, 1))))
    part = Diagnosis(
        Status.CONVERGED, True, SURE, 0.0, SURE, False, 1.0, None, None, None, "good", (PASS_ROWS,)
    )
    found = Calibration(5, 0.0, np.linspace(0.0, 1.0, 5), np.linspace(0.0, 1.0, 5), False, 0.5, 0.5, {}, 0.1)
    judged = lambda calibration: diagnose_stack(
        law, NOTHING, None, (), part, None, calibration, settings=None, key=jr.key(0)
    )
    assert judged(found).advice == ()
    assert judged(None).advice == (PASS_ROWS,)
