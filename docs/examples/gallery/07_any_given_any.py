"""
Any columns given any others
============================

One joint density of the irises, conditioned on the length of the petal and on the width of the sepal.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_iris

from kexpfam import KernelExpFamily

iris = load_iris(as_frame=True).data
iris.columns = ["sepal length", "sepal width", "petal length", "petal width"]
density = KernelExpFamily(model="mixture", random_state=0).fit(iris)
figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
bins = np.arange(-0.15, 3.2, 0.1)  # the widths are rounded to 0.1
for length in (1.5, 4.5, 6.0):
    draws = density.given({"petal length": length}).sample(2000, random_state=0)
    name = f"petal length {length}"
    axes[0].hist(draws["petal width"], bins=bins, density=True, alpha=0.6, label=name)
axes[0].set_xlabel("petal width")
axes[0].legend(frameon=False)
for width in (2.5, 3.5):
    draws = density.given({"sepal width": width}).sample(2000, random_state=0)
    columns = draws["petal length"], draws["petal width"]
    axes[1].scatter(*columns, s=4, alpha=0.5, label=f"sepal width {width}")
axes[1].set(xlabel="petal length", ylabel="petal width")
axes[1].legend(frameon=False, markerscale=4)
