"""
A table with labels and gaps
============================

The Palmer penguins: 344 birds with species, island, sex and four measurements. Some cells are missing. One
joint density of all columns answers several questions: it fills gaps, predicts any column from any others,
and draws new birds.
"""

from palmerpenguins import load_penguins

penguins = load_penguins().drop(columns="year")
penguins.head()

# %%
# Fit
# ---
# Columns of text become labels, and missing cells are used as they are. A species that is never seen on an
# island has a probability near zero there. ``effort="fast"`` trains a small ensemble.

from kexpfam import KernelExpFamily

birds = KernelExpFamily(effort="fast", random_state=0).fit(penguins)
birds.plot()

# %%
# Data in orange, draws in blue: the diagonal has each column alone.
#
# Fill gaps
# ---------
# ``impute`` draws the missing cells given the others of the row. Another ``random_state`` gives other draws:
# where they differ much, the cell is uncertain.

gaps = penguins[penguins.isna().any(axis=1)]
gaps.head(4)

# %%

birds.impute(gaps.head(4), random_state=0).round(1)

# %%
# Any column given any others
# ---------------------------
# What does the bill of a heavy male Gentoo look like?

heavy = birds.given({"species": "Gentoo", "sex": "male", "body_mass_g": 6000.0})
heavy.sample(5, random_state=0).round(1)

# %%
# Which species has a bill of 45 mm and flippers of 195 mm? Compare the log densities of the three labels:

import numpy as np
import pandas as pd

species = penguins["species"].unique()
rows = pd.DataFrame({name: [np.nan] * 3 for name in penguins.columns})
rows["species"], rows["bill_length_mm"], rows["flipper_length_mm"] = species, 45.0, 195.0
scores = birds.score_samples(rows.astype(penguins.dtypes.to_dict()))
probability = np.exp(scores - np.logaddexp.reduce(scores))
pd.Series(probability.round(3), index=species, name="probability").to_frame()

# %%
# New rows
# --------

birds.sample(5, random_state=3).round(1)

# %%
# When it goes wrong
# ------------------
# - *A number is a label.* Whole numbers such as codes and years are read as numbers: declare them, for
#   example ``columns={"year": "category"}``.
# - *A warning about kinds.* It names the columns and the declarations to choose from; see
#   :doc:`/mixed-tables`.
# - *A* ``FewDrawsWarning``. The condition is rare under the model, so few draws support the answer: use a
#   condition with fewer columns, or ``ConditionalKernelExpFamily`` with that target.
# - *Implausible draws.* Use the default effort, and compare ``birds.plot()`` column by column.
