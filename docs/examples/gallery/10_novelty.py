"""
Anomalies: unusual rows
=======================

150 rows of the same density and 30 uniform ones: the p-value of each, and the rows that are flagged at a
false discovery rate of 10 %.
"""

import matplotlib.pyplot as plt
import numpy as np

from kexpfam import KernelExpFamily
from kexpfam.datasets import two_moons

density = KernelExpFamily(random_state=0).fit(two_moons().sample(500, random_state=0))
usual = two_moons().sample(150, random_state=1)
unusual = np.random.default_rng(0).uniform(-3, 3, size=(30, 2))
new = np.concatenate([usual, unusual])
flagged = density.flag(new, fdr=0.1)
figure, axis = plt.subplots(figsize=(5.2, 4.2), layout="constrained")
marks = axis.scatter(*new.T, c=density.novelty(new), cmap="viridis", s=14)
axis.scatter(*new[flagged].T, s=60, color="none", edgecolor="#d9622b", label="flagged")
figure.colorbar(marks, label="p-value")
axis.legend(loc="upper right")
