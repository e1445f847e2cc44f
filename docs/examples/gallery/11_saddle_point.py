"""
The saddle point, step by step
==============================

The paper's algorithm alone: draws of the learned sampler during the fit, from its start to the two moons.
"""

from kexpfam import DDE, Kernel, KernelExpFamily
from kexpfam.datasets import two_moons
from kexpfam.plot import plot_snapshots

X = two_moons().sample(300, random_state=0)
kernel = Kernel(lengthscale=0.5, rkhs_penalty=1e-3)
density = KernelExpFamily(
    model="kernel", kernel=kernel, solver=DDE(steps=400, snapshots=True), random_state=0
)
plot_snapshots(density.fit(X))
