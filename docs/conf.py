"""Settings of the documentation site: ``make docs`` builds it, and any warning is an error."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from kexpfam import __version__  # noqa: E402

project, author, release = "kexpfam", "The kexpfam developers", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_parts"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4

# The libraries of the adapters are not needed to read about them.
autodoc_mock_imports = ["arviz", "mapie", "numpyro", "sbi", "skpro", "torch"]
autodoc_member_order = "bysource"
# What scikit-learn adds to every estimator is described there.
autodoc_default_options = {
    "exclude-members": "get_metadata_routing, set_fit_request, set_predict_request, set_score_request"
}
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"kexpfam {release}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
# Links between pages are written for a reader of the repository too: the page of the reproduction lies
# outside of docs.
MOVED = {"](../reproduction/README.md": "](paper-tables.md"}
# Where pages that nobody has given a place in the navigation appear.
OTHERS = "% pages without a place"


def redirected(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links that lead out of the folder lead to the pages that show the same; give every page a place."""
    for before, after in MOVED.items():
        source[0] = source[0].replace(before, after)
    if page == "index":
        folder = Path(app.srcdir)
        pages = [str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*.md")]
        placeless = sorted(name for name in pages if name != "index" and f"\n{name}\n" not in source[0])
        source[0] = source[0].replace(OTHERS, "\n".join(placeless))


def escaped(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep the underscore at the end of what a fit has learned: to reStructuredText it is a reference."""
    lines[:] = [re.sub(r"^(:(?:ivar|vartype) \w+)_:", r"\1\\_:", line) for line in lines]


def setup(app: Sphinx) -> None:
    """Connect both."""
    app.connect("source-read", redirected)
    app.connect("autodoc-process-docstring", escaped, priority=900)
