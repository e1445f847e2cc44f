"""
The convergence theorem, measured
=================================

The paper bounds the mean squared gradient over L steps by a multiple of L^(−1/2). The records of the
repository have it for Algorithm 1, with three seeds for each L (run this in a checkout).
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import reproduction
from reproduction.records import Ledger, good

folder = Path(reproduction.__file__).parent
runs = good(Ledger(folder, "stationarity").records(), method="Algorithm 1")
steps = np.array([run["cell"]["steps"] for run in runs])
gradients = np.array([run["values"]["squared_gradient"] for run in runs])
figure, axis = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
axis.plot(np.log2(steps), np.log10(gradients), "o", label="measured")
scale = np.median(gradients * np.sqrt(steps))
axis.plot(np.log2(steps), np.log10(scale / np.sqrt(steps)), "k:", label="slope −1/2")
axis.set(xlabel="log₂ of the steps L", ylabel="log₁₀ of the mean squared gradient")
axis.legend(frameon=False)
