"""
Reliability of two models
=========================

Share of held-out rows inside the central intervals of each nominal coverage: a fitted conditional density
beside a normal distribution around a linear regression, on data with growing noise.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from kexpfam import ConditionalKernelExpFamily
from kexpfam.plot import plot_reliability

rng = np.random.default_rng(0)
x = rng.uniform(0.0, 3.0, size=600)
y = np.sin(2.0 * x) + (0.2 + 0.2 * x**2) * rng.normal(size=600)
model = ConditionalKernelExpFamily(model="kernel", random_state=0).fit(x[:250, None], y[:250])
line = np.polynomial.Polynomial.fit(x[:250], y[:250], 1)
normal = stats.norm(line(x[250:]), np.std(y[:250] - line(x[:250])))
levels = {
    "kexpfam": model.cdf(x[250:, None], y[250:]),
    "linear, normal errors": normal.cdf(y[250:]),
}
figure, axes = plt.subplots(1, 2, figsize=(7.8, 3.6), layout="constrained")
for axis, (name, level) in zip(axes, levels.items(), strict=True):
    # The coverage of the smallest central interval that contains the target.
    plot_reliability(np.abs(2.0 * level - 1.0), ax=axis)
    axis.set_title(name)
