"""
Densities under single conditions
=================================

The target has one branch on the left and two on the right. A mean between two branches describes neither.
"""

import matplotlib.pyplot as plt
import numpy as np

from kexpfam import ConditionalKernelExpFamily
from kexpfam.plot import plot_given

rng = np.random.default_rng(0)
x = rng.uniform(0.0, 3.0, size=(300, 1))
branch = np.where((x[:, 0] > 1.5) & (rng.uniform(size=300) < 0.5), -1.0, 1.0)
y = branch * np.sin(x[:, 0]) + 0.2 * rng.normal(size=300)

model = ConditionalKernelExpFamily(model="kernel", random_state=0).fit(x, y)
figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
for axis, place in zip(axes, (0.8, 2.2), strict=True):
    plot_given(model.given([place]), ax=axis)
