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
density = KernelExpFamily(model="mixture", random_state=0).fit(iris)
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.8), layout="constrained")
for length in (1.5, 4.5, 6.0):
    draws = density.given({"petal length (cm)": length}).sample(2000, random_state=0)
    bins = np.arange(-0.15, 3.2, 0.1)  # the widths are rounded to 0.1
    left.hist(draws["petal width (cm)"], bins=bins, alpha=0.6, label=f"petal length {length}")
left.set(xlabel="petal width", ylabel="draws")
for width in (2.5, 3.5):
    draws = density.given({"sepal width (cm)": width}).sample(2000, random_state=0)
    columns = draws["petal length (cm)"], draws["petal width (cm)"]
    right.scatter(*columns, s=4, alpha=0.5, label=f"sepal width {width}")
right.set(xlabel="petal length", ylabel="petal width")
figure.legend(loc="outside lower center", ncols=3, frameon=False, markerscale=3)
