"""
The saddle point, step by step
==============================

The paper's algorithm alone: draws of the learned sampler during the fit (blue) over the data (orange).
"""

from kexpfam import DDE, Kernel, KernelExpFamily
from kexpfam.datasets import two_moons
from kexpfam.plot import plot_snapshots

X = two_moons().sample(300, random_state=0)
kernel = Kernel(lengthscale=0.5, rkhs_penalty=1e-3)
solver = DDE(steps=400, snapshots=True)
density = KernelExpFamily(model="kernel", kernel=kernel, solver=solver, random_state=0)
plot_snapshots(density.fit(X))
