"""The verdict: what is measured about a sampler, and which words go with which numbers."""

import json
import pickle

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from oracles import normal, tilted_normal, tilted_normal_log_partition

from kexpfam.data.scaling import Scaling
from kexpfam.fit.problem import Status
from kexpfam.fit.stack import CandidateScore
from kexpfam.judge.diagnosis import Judgement, Measurement, verdict_of
from kexpfam.judge.measure import PASS_ROWS, Evidence, diagnose, sampler_fit
from kexpfam.model.density import Estimate, Inputs, Sampler, TiltedDensity
from kexpfam.model.ensemble import LawDensity
from kexpfam.model.measures import Gaussian
from kexpfam.model.networks import AbstractTransport, Identity

NOTHING = np.zeros((50, 0))


class Fold(AbstractTransport):
    """``|noise|``: two points of noise for every point, so that space is folded."""

    def __call__(self, noise, condition):
        return jnp.abs(noise)


def density(sampler: Sampler, slope: float = 0.5) -> TiltedDensity:
    """Return N(slope, 1) as a tilted standard normal."""
    plain = Scaling(*(np.full(1, value) for value in (0.0, 1.0, 0.0, 1.0, 1.0)), arcsinh=(False,))
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


def diagnosis_of(shift=0.0, *, f_gap=0.0, status=Status.CONVERGED, error=0.0, **settings):
    """Return the diagnosis of N(0.5, 1) with a sampler N(0.5 + shift, 1) and a given f_gap."""
    fitted = density(Sampler(normal(0.5 + shift), Identity(), normal()))
    estimate = fitted.log_partition._replace(standard_error=error)
    fitted = eqx.tree_at(lambda one: one.log_partition, fitted, estimate)
    settings = Judgement(draws=2000, certifying_draws=10, refine=0, **settings)
    certify = lambda *_, key: {"f_gap": f_gap}
    fields = {"status": {"kernel": status}, "certify": certify, "settings": settings, "key": jr.key(0)}
    return diagnose(Evidence(density=fitted, training=NOTHING, **fields))


# KL(q || p) is shift^2 / 2, and the effective share exp(-shift^2).
ONLY_SHARE = {"good_sampler_kl": 100.0}
CASES = {
    "all is well": ({}, "good", None),
    "f a little off": ({"f_gap": 0.05}, "fair", "f is not at its optimum"),
    "f far off": ({"f_gap": 0.2}, "poor", "f is not at its optimum"),
    "sampler a little off": ({"shift": 0.2**0.5}, "good", None),
    "sampler off": ({"shift": 0.4**0.5}, "fair", "differs from the density"),
    "sampler far off": ({"shift": 1.2**0.5}, "poor", "differs from the density"),
    "few effective draws": ({"shift": 1.6**0.5, **ONLY_SHARE}, "fair", "differs from the density"),
    "hardly any effective draws": ({"shift": 5.0**0.5, **ONLY_SHARE}, "poor", "differs from the density"),
    "uncertain constant": ({"error": 1.0}, "poor", "log Z is uncertain"),
    "stopped early": ({"status": Status.RAN_ALL_STEPS}, "fair", "All steps ran"),
    "larger threshold": ({"shift": 0.4**0.5, "good_sampler_kl": 0.3}, "good", None),
    "smaller thresholds": ({"shift": 0.4**0.5, "good_sampler_kl": 0.05, "poor": 2.0}, "poor", "differs"),
}


@pytest.mark.parametrize(("facts", "expected", "advice"), CASES.values(), ids=CASES)
def test_the_verdict_goes_with_the_numbers(facts, expected, advice):
    found = diagnosis_of(**facts)
    assert found.verdict == expected
    assert found.advice == () if advice is None else any(advice in line for line in found.advice)
    assert found.converged == (expected != "poor" and "status" not in facts)


def test_measurements_are_found_by_name_and_as_attributes():
    found = diagnosis_of(shift=0.4, f_gap=0.01)
    kl = found["sampler_kl"]
    assert abs(kl.value - 0.08) < 4 * kl.error
    assert (kl.level, kl.label) == ("good", "KL(sampler || density)")
    assert found.sampler_kl == kl.value and found.f_gap == 0.01
    assert found.duality_gap == pytest.approx(0.01 + kl.value)
    assert list(found) == [one.name for one in found.values()] and "sampler_mmd" not in found
    with pytest.raises(AttributeError, match="no 'crps'; it has kernel_status"):
        _ = found.crps
    assert pickle.loads(pickle.dumps(found)).verdict == found.verdict


def test_the_report_has_a_row_for_each_labelled_measurement_and_json_has_all():
    found = diagnosis_of(shift=0.4**0.5)
    lines = str(found).splitlines()
    assert lines[0].split() == ["verdict:", "FAIR"]
    assert len(lines) == 3 + len(found.labelled()) + len(found.advice)
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert set(told) == {"verdict", "solved", "fits", "advice", *found}
    assert told["sampler_kl"]["level"] == "fair" and "sample(..., refine=10)" in told["sampler_kl"]["meaning"]


def test_a_verdict_is_the_lowest_level():
    levels = lambda *several: verdict_of(Measurement(str(k), 0.0, level=one) for k, one in enumerate(several))
    assert levels() == levels(None, "unknown") == "good"
    assert levels("good", "fair", None) == "fair"
    assert levels("good", "poor", "fair") == "poor"


def test_settings_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="draws must be at least 10"):
        Judgement(draws=1)


def test_a_normal_base_is_its_own_best_sampler():
    law = Gaussian(np.zeros(1), np.eye(1))
    fit = sampler_fit(density(Sampler(law, Identity(), law), slope=0.0), NOTHING, 500, key=jr.key(0))
    assert fit.kl.value == pytest.approx(0.0, abs=1e-9)
    assert fit.share == pytest.approx(1.0)


class Conditional(LawDensity):
    """A distribution with a condition that it does not depend on."""

    @property
    def conditional(self):
        return True


def test_rows_that_were_passed_are_not_asked_for_again():
    law = Conditional(Gaussian(np.zeros(1), np.eye(1)), Scaling.plain(np.zeros((5, 1))))
    judged = lambda *calibration: diagnose(
        Evidence(density=law, training=NOTHING, calibration=calibration, key=jr.key(0))
    )
    assert judged(Measurement("pit", np.linspace(0.0, 1.0, 5))).advice == ()
    assert judged().advice == (PASS_ROWS,) and judged().verdict == "good"


def test_candidates_and_facts_are_measurements():
    law = LawDensity(Gaussian(np.zeros(1), np.eye(1)), Scaling.plain(np.zeros((5, 1))))
    candidates = [CandidateScore("mixture", 0.7, -1.25, 0.1), CandidateScore("kernel", 0.3, np.nan, np.nan)]
    facts = {"mixture": {"components": 3.0, "loss": Estimate(1.0, 0.5, 10.0)}}
    evidence = Evidence(density=law, training=NOTHING, candidates=candidates, facts=facts, key=jr.key(0))
    found = diagnose(evidence)
    assert (found.mixture_weight, found.mixture_score, found["mixture_score"].error) == (0.7, -1.25, 0.1)
    assert "kernel_score" not in found
    assert found.mixture_components == 3.0 and found["mixture_loss"].error == 0.5
    assert "70% of the density; held-out score -1.250 ± 0.1" in str(found)
