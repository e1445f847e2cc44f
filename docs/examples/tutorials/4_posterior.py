"""
A posterior from a simulator
============================

A simulator turns parameters into data, :math:`x \\sim p(x \\mid \\theta)`, with an unknown likelihood.
Pairs of parameters from the prior and simulated data are draws of the joint distribution. A conditional
density of :math:`\\theta` given :math:`x`, fitted to such pairs, estimates the posterior for every
observation at once.

A ball is thrown with unknown speed and angle. Its landing place and its flight time are measured with
errors.
"""

import numpy as np

LOW, HIGH = np.array([5.0, 0.2]), np.array([15.0, 1.3])  # metres per second; radians


def prior(count, rng):
    return rng.uniform(LOW, HIGH, size=(count, 2))


def simulate(theta, rng):
    speed, angle = theta.T
    time = 2.0 * speed * np.sin(angle) / 9.81
    landed = speed * np.cos(angle) * time
    return np.column_stack([landed, time]) + [0.5, 0.1] * rng.normal(size=(len(theta), 2))


rng = np.random.default_rng(0)
theta = prior(1000, rng)
x = simulate(theta, rng)

# %%
# Fit and condition on an observation
# -----------------------------------
# The parameters are the targets, the data are the conditions, and ``bounds`` is the support of the prior.

from kexpfam import ConditionalKernelExpFamily

model = ConditionalKernelExpFamily(bounds=(LOW, HIGH), effort="fast", random_state=0)
model.fit(x, theta)

seen = np.array([9.0, 1.4])
posterior = model.given(seen)
figure = posterior.plot()
figure.axes[0].set(xlabel="speed", ylabel="angle")
figure.axes[0].set_title("draws of the posterior")

# %%
# Without errors, time and place determine speed and angle. The posterior must be near these values:

draws = posterior.sample(4000, random_state=1)
upwards, forwards = 9.81 * seen[1] / 2.0, seen[0] / seen[1]
exact = np.array([np.hypot(upwards, forwards), np.arctan2(upwards, forwards)])
print("posterior mean     ", draws.mean(axis=0).round(2))
print("posterior deviation", draws.std(axis=0).round(2))
print("without errors     ", exact.round(2))
assert np.all(np.abs(draws.mean(axis=0) - exact) < 2.0 * draws.std(axis=0))

# %%
# Check by simulation
# -------------------
# If the posterior is right, the rank of the true parameter among its draws is uniform over new simulations
# (simulation-based calibration, Talts et al. 2018). The test of 300 simulations finds large errors only.

from scipy import stats

true = prior(300, rng)
drawn = model.sample(simulate(true, rng), 200, random_state=2)  # shape (300, 200, 2)
ranks = (drawn < true[:, None]).mean(axis=1)
for name, rank in zip(["speed", "angle"], ranks.T, strict=True):
    print(f"{name}: p = {stats.kstest(rank, 'uniform').pvalue:.2f}")

# %%

import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.6), layout="constrained")
for axis, name, rank in zip(axes, ["speed", "angle"], ranks.T, strict=True):
    axis.hist(rank, bins=15, color="#2f7fc1")
    axis.set(xlabel=f"rank of the true {name}", ylabel="simulations")

# %%
# When it goes wrong
# ------------------
# - *A small p-value.* The posterior is biased, too narrow or too wide in that parameter. A value near 0.05
#   can be chance: repeat the test with new simulations. If it stays small, fit with more simulations and
#   with the default effort.
# - *An observation unlike all simulations.* The model extrapolates. Compare it with the simulated data
#   first, for example with ``KernelExpFamily().fit(x).novelty([seen])``.
# - *A simulator that takes minutes.* Sequential methods choose where to simulate next; kexpfam does not.
#   Use `sbi <https://sbi.readthedocs.io>`_, and :doc:`/stacks` for kexpfam inside it.
