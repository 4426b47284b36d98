"""The site: Sphinx with furo, pages in Markdown (MyST), tutorials executed (myst-nb), the reference from docstrings."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from varprop.version import __version__

project = "varprop"
author = "varprop contributors"
copyright = "varprop contributors"
release = version = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "generate",  # docs/generate.py: the command line, the rules, llms.txt
]
exclude_patterns = ["_build", "results/begun", "results/claims.md"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"  # of the tutorials; a cache would not see that the library has changed
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True  # what a cell prints is one block
suppress_warnings = ["myst.xref_missing"]  # links to sources and examples, which tests/test_pages.py checks
autodoc_typehints = "description"
default_role = "code"  # `name` in a docstring
smartquotes = False  # options (--json) and primes (X') stay as they are written
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_use_ivar = True
html_theme = "furo"
html_title = f"varprop {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
