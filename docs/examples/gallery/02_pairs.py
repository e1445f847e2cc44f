"""
Pairs of columns
================

Four columns of scikit-learn's wines: data and draws of the model, pair by pair.
"""

from sklearn.datasets import load_wine

from kexpfam import KernelExpFamily

wine = load_wine(as_frame=True).frame[["alcohol", "flavanoids", "color_intensity", "proline"]]
density = KernelExpFamily(effort="fast", random_state=0).fit(wine)
density.plot()
