"""
A density under its data
========================

Three noisy rings: the fitted density as a map, with the training rows.
"""

import matplotlib.pyplot as plt

from kexpfam import KernelExpFamily
from kexpfam.datasets import rings
from kexpfam.plot import plot_density

X = rings().sample(500, random_state=0)
density = KernelExpFamily(random_state=0).fit(X)
figure, axis = plt.subplots(figsize=(5.5, 4.6), layout="constrained")
plot_density(density, ax=axis)
