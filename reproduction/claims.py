"""The claims of the paper, section by section, with their evidence."""

from dataclasses import dataclass

from reproduction import readings, saddle_readings
from reproduction.evidence import (
    MEASURED,
    NOT_REPRODUCED,
    REPRODUCED,
    SHOWN,
    TESTED,
    Reading,
    Records,
    shown,
    tested,
)
from reproduction.readings import SETS
from reproduction.specs import COMMAND
from reproduction.tables import NOTHING, markdown

__all__ = ["CLAIMS", "INTRODUCTION", "NOT_MEASURED", "Claim", "page"]

NOT_MEASURED = "not measured"
INTRODUCTION = (
    f"Each claim has the kind of its evidence. *{MEASURED}*: the records were compared with the criterion, "
    f"and *{REPRODUCED}* "
    f"means that it holds. *{TESTED}*: an identity or an algorithm, which a test of this repository checks "
    "to the tolerance "
    f"given. *{SHOWN}*: a picture, without a verdict. A reason after *{NOT_REPRODUCED}, because* was "
    "measured; a guess "
    "says *perhaps*. DDE is the paper's algorithm alone, without a warm start or a polish; *default* is "
    "`solver='auto'`."
)
# Score matching as the paper and its authors have it; ours starts from a mixture by default.
PUBLISHED = "score matching, normal base"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the source of its evidence, the paper's number, and the reading of our records.

    ``source`` is an experiment, or for a claim that is tested, the test.
    """

    section: str
    statement: str
    source: str
    printed: str
    reading: Reading

    @property
    def command(self) -> str:
        """Return the command that produces the evidence."""
        return f"pytest {self.source}" if self.reading.evidence == TESTED else f"{COMMAND} {self.source}"


def page(records: Records) -> str:
    """Return the table of all claims."""
    rows = []
    for claim in CLAIMS:
        ours, verdict = claim.reading.read(records) or (NOTHING, NOT_MEASURED)
        evidence, criterion, _ = claim.reading
        rows.append(
            [
                claim.section,
                claim.statement,
                evidence,
                f"`{claim.command}`",
                ours,
                claim.printed,
                criterion,
                verdict,
            ]
        )
    return markdown(
        ("section", "claim", "evidence", "command", "ours", "the paper's", "criterion", "verdict"), rows
    )


CLAIMS = (
    Claim("2", "The gradient of A(f) is the model's mean of the features (section 2).",
          "tests/fit/test_convex.py::test_the_value_is_the_formula_and_its_gradient_vanishes_at_the_optimum",
          "identity",
          tested("1e-7, by differences")),
    Claim("2", "The penalised likelihood is concave: one optimum, whatever the start (section 2).",
          "tests/fit/test_convex.py::test_the_start_does_not_matter", "identity", tested("weights to 1e-4")),
    Claim("2", "That mean can be taken by chains or by annealed importance sampling.", "algorithms",
          "algorithm",
          readings.near_exact("algorithms", "contrastive divergence, persistent",
          "annealed importance sampling")),
    Claim("2", "Score matching costs n² d² memory and n³ d³ time.", "cost", "d², d³",
          readings.grows_in_dimension("score matching, full", memory=2.0, time=3.0)),
    Claim("2", "DDE is linear in d.", "cost", "d", readings.grows_in_dimension("dde", memory=None,
          time=None)),
    Claim("2", "DDE takes less memory and time than score matching.", "cost", NOTHING, readings.cheaper),
    Claim("3", "A(f) is the largest value of E_q f − KL(q ‖ p0), attained at p_f (Theorem 1).",
          ""
          "tests/paper/test_mmd_gan.py::"
          "test_the_saddle_value_exceeds_the_likelihood_by_the_divergence_of_q_and_p_f",
          "identity", tested("1e-8 nats")),
    Claim("3", "Primal and dual have the same value (Theorem 2).",
          "tests/fit/test_saddle.py::test_primal_and_dual_agree_on_a_finite_domain", "identity",
          tested("1e-6 nats")),
    Claim("3", "The dual is an MMD GAN with a KL penalty (remark).",
          "tests/paper/test_mmd_gan.py::test_the_least_regularised_mmd_is_the_largest_penalised_likelihood",
          "identity",
          tested("1e-5 nats")),
    Claim("3", "Maximum-entropy moment matching has the same solution (remark).",
          ""
          "tests/paper/test_moment_matching.py::"
          "test_the_matched_distribution_is_the_density_of_the_penalised_likelihood",
          "identity", tested("log density to 1e-4")),
    Claim("3", "Kernel density estimates fail in many dimensions.", "table1", NOTHING,
          readings.kernel_density_fails),
    Claim("3", "Simple families of q leave a huge bias.", "duals", NOTHING, readings.restricted_families),
    Claim("3", "Flows are too restrictive even on the synthetic sets.", "table1", NOTHING,
          readings.flows_lag),
    Claim("3", "KL is its own dual, attained at ν = log q/p0 (doubly dual form).",
          "tests/fit/test_saddle.py::test_the_kl_bound_is_attained_at_the_log_ratio", "identity",
          tested("5 standard errors of 20,000 draws")),
    Claim("4", "The gradient for the sampler is unbiased (Theorem 3).",
          "tests/fit/test_saddle.py::"
          "test_the_gradient_of_the_maximum_over_f_is_the_partial_one_by_differences", "identity",
          tested("1e-7, by differences")),
    Claim("4", "Algorithms 1 and 2: expansions that grow by functional gradients.",
          "tests/paper/test_functional.py::test_the_players_are_those_of_the_printed_algorithm", "algorithm",
          tested("every term to 1e-6 of a plain Python twin")),
    Claim("4", "Algorithm 2 takes K² d operations for K steps (appendix).",
          "tests/paper/test_functional.py::test_a_step_costs_as_many_operations_as_terms_times_dimensions",
          "K² d",
          tested("5 %")),
    Claim("4", "Random features hold f in r d numbers, whatever the rows (remark).",
          "tests/paper/test_random_features.py::test_f_lives_on_as_many_random_features_as_asked_for",
          "algorithm",
          tested("the number itself")),
    Claim("4", "Random, adapted and deep features in place of the kernel's (appendix).", "algorithms",
          "algorithm",
          readings.near_exact("algorithms", "random features", "adapted features", "deep network")),
    Claim("5", "KL falls like 1/n for a kernel whose spectrum falls fast.", "rate", "−1",
          readings.rate_of("exact", -1.0, "−1")),
    Claim("5", "The same for the doubly dual embedding.", "rate", "−1", readings.rate_of("dde", -1.0, "−1")),
    Claim("5", "Score matching reaches n^(−2/3).", "rate", "−0.67", readings.rate_of("score matching",
          -2.0 / 3.0, "−0.67")),
    Claim("5", "An iterate drawn by its step size is near a stationary point (Theorem 5).", "algorithms",
          NOTHING,
          readings.left_to_the_polish("dde, random iterate")),
    Claim("5",
          "The squared gradient of the dual objective, mean over L steps, falls like L^(−1/2) (Theorem 5).",
          "stationarity", "−0.5", saddle_readings.falls_with_steps("Algorithm 1")),
    Claim("6", "Table 1, two moons: MMD² ×10³ of the sampler.", "table1", "0.11", readings.like_printed("dde",
          "two-moons")),
    Claim("6", "The same on the paper's own files: 1,000 rows to train on, 5,000 to test.", "moons", "0.11",
          readings.like_printed_on_its_files),
    Claim("6", "Table 1, ring.", "table1", "1.53", readings.like_printed("dde", "rings")),
    Claim("6", "Table 1, grid.", "table1", "1.32", readings.like_printed("dde", "grid")),
    Claim("6", "Table 1, HMC on score matching.", "table1", "1.32, 3.19, 40.39",
          readings.like_printed("score matching", *SETS)),
    Claim("6", "Its samples are nearer to the data than HMC on score matching.", "table1",
          "0.11/1.32, 1.53/3.19, 1.32/40.39",
          readings.nearer("dde", PUBLISHED, "mmd", 1e3, 2)),
    Claim("6", "Score matching is ahead of kernel density estimates.", "table1", NOTHING,
          readings.nearer(PUBLISHED, "kde", "mmd", 1e3, 2)),
    Claim("6", "Beyond the paper: DDE is ahead of score matching in held-out likelihood too.", "table1",
          NOTHING,
          readings.nearer("dde", PUBLISHED, "nll", 1.0, 3)),
    Claim("6", "Beyond the paper: the default is, also where score matching starts from a mixture.", "table1",
          NOTHING,
          readings.nearer("auto", "score matching", "nll", 1.0, 3)),
    Claim("6", "Sampling is faster by orders of magnitude.", "table1",
          "0.07 s, 0.07 s, 0.04 s; 111 to 202 times faster",
          readings.samples_faster),
    Claim("6", "Figure 1, above: the samples cover the training data.", "figures", "by eye", readings.covers),
    Claim("6", "Figure 1, below: the learned f.", "figures", "figure", shown("portrait", *SETS,
          method="dde")),
    Claim("6", "All modes are kept.", "table1", "by eye", readings.keeps_every_circle),
    Claim("6", "Figures 2 and 3: the sampler converges from its start.", "figures", "by eye",
          readings.converges),
    Claim("6", "Table 2: NLL on sixteen sets.", "table2", "the table's column", readings.table_two("dde")),
    Claim("6", "Beyond the paper: the same for the default.", "table2", "the table's column",
          readings.table_two("auto")),
    Claim("6", "Table 2 by the protocol of the released code, which looks at the test half.", "table2",
          "the table's column",
          readings.released_protocol),
    Claim("6", "KCEF is numerically unstable on two sets.", "table2", "cpus, crabs",
          readings.unstable_on("cpus", "crabs")),
    Claim("6", "Significantly ahead of its competitors on six sets (here: the default).", "table2", "6 of 16",
          readings.beats_competitors),
    Claim("6", "The conditional saddle point finds the penalised likelihood's optimum.", "table2", NOTHING,
          readings.near_exact("table2", "dde")),
)  # fmt: skip
