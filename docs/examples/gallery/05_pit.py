"""
Calibration: PIT and coverage
=============================

Diabetes progression, a whole number, given ten measurements. If the predicted distributions are right, the
values F(y | x) of held-out rows are uniform and intervals cover what they state. The grey bands contain
95 % of calibrated models. Here few targets are above the highest quantiles: the intervals are slightly wide.
"""

from sklearn.datasets import load_diabetes

from kexpfam import ConditionalKernelExpFamily
from kexpfam.plot import plot_calibration

X, y = load_diabetes(return_X_y=True)
model = ConditionalKernelExpFamily(target_columns="integer", random_state=0)
model.fit(X[:300], y[:300])
plot_calibration(model.diagnose(X[300:], y[300:]))
