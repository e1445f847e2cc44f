"""
Calibration: PIT and coverage
=============================

Diabetes progression given ten measurements. If the predicted distributions are right, the values F(y | x)
of held-out rows are uniform and intervals cover what they state. The grey bands contain 95 % of calibrated
models.
"""

from sklearn.datasets import load_diabetes

from kexpfam import ConditionalKernelExpFamily
from kexpfam.plot import plot_calibration

X, y = load_diabetes(return_X_y=True)
model = ConditionalKernelExpFamily(effort="fast", random_state=0).fit(X[:300], y[:300])
plot_calibration(model.diagnose(X[300:], y[300:]))
