"""
Reliability of two models
=========================

Share of held-out rows inside the central intervals of each nominal coverage: a fitted conditional density
beside a normal distribution around a linear regression, on data with growing noise.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats
from sklearn.linear_model import LinearRegression

from kexpfam import ConditionalKernelExpFamily
from kexpfam.plot import plot_reliability

rng = np.random.default_rng(0)
x = rng.uniform(0.0, 3.0, size=(600, 1))
y = np.sin(2.0 * x[:, 0]) + (0.2 + 0.2 * x[:, 0] ** 2) * rng.normal(size=600)
train, test = slice(0, 250), slice(250, 600)

model = ConditionalKernelExpFamily(model="kernel", random_state=0).fit(x[train], y[train])
line = LinearRegression().fit(x[train], y[train])
spread = np.std(y[train] - line.predict(x[train]))
figure, axes = plt.subplots(1, 2, figsize=(7.8, 3.6), layout="constrained")
normal = stats.norm(line.predict(x[test]), spread)
levels = {
    "kexpfam": model.cdf(x[test], y[test]),
    "linear regression, normal errors": normal.cdf(y[test]),
}
for axis, (name, level) in zip(axes, levels.items(), strict=True):
    # The coverage of the smallest central interval that contains the target.
    plot_reliability(np.abs(2.0 * level - 1.0), ax=axis)
    axis.set_title(name)
