"""Rows with a label, a missing cell here and there, and settings of a small chain."""

import numpy as np
import pandas as pd

from kexpfam.fit.learned import Learned

SMALL = Learned(folds=3, repeats=2, width=10, epochs=8, cells=48, steps=60)


def labelled_rows(seed: int, count: int = 240) -> pd.DataFrame:
    """Return rows of a label, a number that depends on it, and one that depends on both, with gaps."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(["u", "v"], size=count)
    a = np.where(kind == "u", 0.0, 4.0) + rng.normal(size=count)
    found = pd.DataFrame({"kind": kind, "a": a, "b": a + 0.5 * rng.normal(size=count)})
    found.loc[rng.random(count) < 0.1, "b"] = np.nan
    return found
