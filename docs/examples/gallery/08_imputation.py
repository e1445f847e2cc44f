"""
Filling gaps
============

The second coordinate of half of the rows is removed. Each gap is drawn from its distribution given the
first coordinate, so that both moons stay; a mean would lie between them.
"""

import matplotlib.pyplot as plt
import numpy as np

from kexpfam import KernelExpFamily
from kexpfam.datasets import two_moons

X = two_moons().sample(600, random_state=0)
density = KernelExpFamily(random_state=0).fit(X[:300])
gaps = X[300:].copy()
gaps[:, 1] = np.nan
filled = density.impute(gaps, random_state=0)
figure, axes = plt.subplots(1, 2, figsize=(7.8, 3.9), layout="constrained", sharey=True)
panels = {"true rows": X[300:], "second column filled": filled}
for axis, (title, rows) in zip(axes, panels.items(), strict=True):
    axis.scatter(rows[:, 0], rows[:, 1], s=5, color="#2f7fc1")
    axis.set(title=title, aspect="equal", xlim=(-3.5, 3.5))
