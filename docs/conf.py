"""Settings of the documentation site: ``make docs`` builds it, and any warning is an error."""

import os
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
autodoc_default_options = {"exclude-members": "get_metadata_routing, set_fit_request, set_predict_request, set_score_request"}
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_ivar = False

html_theme = "furo"
html_title = f"kexpfam {release}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
# Links between pages are written for a reader of the repository too: the page of the reproduction lies outside of docs.
MOVED = {"](../reproduction/README.md": "](paper-tables.md"}


def setup(app: Sphinx) -> None:
    """Let links that lead out of the folder lead to the pages that show the same."""

    def redirect(app: Sphinx, page: str, source: list[str]) -> Any:
        for before, after in MOVED.items():
            source[0] = source[0].replace(before, after)

    app.connect("source-read", redirect)
