"""Settings of the documentation site: ``make docs`` builds it, and any warning is an error."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent), str(ROOT)]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["MPLBACKEND"] = "agg"

from kexpfam import __version__  # noqa: E402

project, author, release = "kexpfam", "The kexpfam developers", __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "site_parts",
]
exclude_patterns = ["_build", "examples"]

# Scripts run while the site is built; those that did not change since the last build keep their pages.
sphinx_gallery_conf = {
    "examples_dirs": ["examples/tutorials", "examples/gallery"],
    "gallery_dirs": ["tutorials", "gallery"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("site_parts.figures_of_block",),
    "ignore_repr_types": r"matplotlib|kexpfam\.plot",
    "reset_modules": (),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 3600,
    "parallel": 2,
}

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
# Quotes and dots only: two hyphens are an option of a command, not a dash.
smartquotes_action = "qe"

html_theme = "furo"
html_title = f"kexpfam {release}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False
# Links between pages are written for a reader of the repository too: the page of the reproduction is
# outside of docs, and scripts become pages with their output.
MOVED = {
    r"\]\(\.\./reproduction/README\.md": "](paper-tables.md",
    r"\]\((\.\./)?(?:docs/)?examples/(\w+)/README\.rst": r"](\1\2/index.rst",
    r"\]\((\.\./)?(?:docs/)?examples/(\w+)/(\w+)\.py": r"](\1\2/\3.rst",
}
# Where pages that nobody has given a place in the navigation appear.
OTHERS = "% pages without a place"


def redirected(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links that lead out of the folder lead to the pages that show the same; give every page a place."""
    for before, after in MOVED.items():
        source[0] = re.sub(before, after, source[0])
    if page == "index":
        folder = Path(app.srcdir)
        pages = [str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*.md")]
        placeless = sorted(name for name in pages if name != "index" and f"\n{name}\n" not in source[0])
        source[0] = source[0].replace(OTHERS, "\n".join(placeless))


def escaped(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep the underscore at the end of what a fit has learned: to reStructuredText it is a reference."""
    lines[:] = [re.sub(r"^(:(?:ivar|vartype) \w+)_:", r"\1\\_:", line) for line in lines]


def skipped(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, which the text of their class describes."""
    return True if str(obj.__doc__).startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """Connect all of them."""
    app.connect("autodoc-skip-member", skipped)
    app.connect("source-read", redirected)
    app.connect("autodoc-process-docstring", escaped, priority=900)
