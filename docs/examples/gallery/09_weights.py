"""
Weights of rows
===============

Rows of a standard normal distribution with importance weights for a normal distribution around 1.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from kexpfam import KernelExpFamily

x = np.random.default_rng(0).normal(size=(500, 1))
plain = KernelExpFamily(random_state=0).fit(x)
weighted = KernelExpFamily(random_state=0).fit(x, sample_weight=np.exp(x[:, 0]))
grid = np.linspace(-3.5, 4.5, 300)[:, None]
figure, axis = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
axis.plot(grid, np.exp(plain.score_samples(grid)), label="without weights")
axis.plot(grid, np.exp(weighted.score_samples(grid)), label="with weights")
axis.plot(grid, stats.norm.pdf(grid, 1.0, 1.0), "k:", label="N(1, 1)")
axis.set(xlabel="x", ylabel="density")
axis.legend(frameon=False)
