"""How `make docs` builds the site: these pages, the README as its front page, and a reference from docstrings."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

import paceline

project = "paceline"
author = copyright = "the paceline authors"
release = paceline.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# package.md is for package indexes.
exclude_patterns = ["results", "package.md"]

html_theme = "furo"
html_title = f"paceline {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "native"

myst_heading_anchors = 3
# Names in docstrings stand in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True
add_module_names = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def moved(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """Makes links of a page that lies beside docs/ those of the page that includes it."""
    text = content[0].replace("](docs/", "](").replace("](examples/", "](../examples/")
    content[0] = text.replace("](CONTRIBUTING.md", "](contributing.md").replace("](CHANGELOG.md", "](changelog.md")


def setup(app: Sphinx) -> None:
    """Sphinx calls it."""
    app.connect("include-read", moved)
