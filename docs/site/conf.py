"""Settings of the documentation site; `tools/site.py` builds it from a copy in which links lead where they do here."""

from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

project = "ATLAS"
author = "The ATLAS authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_title = "ATLAS"
html_copy_source = False
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_static_path = ["site.css"]
default_role = "literal"
myst_heading_anchors = 6
suppress_warnings = ["misc.highlighting_failure"]  # a block of mixed output is shown as it is

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

FIELDS = ("attribute", "data", "property")
"""What has no sections: there Napoleon would take all before the first colon for a type."""


def setup(app: Sphinx) -> None:
    """Let sections like `Args:` be read."""
    app.connect("autodoc-process-docstring", read_sections)


def read_sections(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Put what Sphinx reads in the place of `Args:`, `Raises:` and the like, and mark code and formulas as such."""
    if what not in FIELDS:
        for index in range(len(lines) - 1, 1, -1):  # what is indented below an empty line
            before = next((line for line in reversed(lines[:index]) if line), "")
            if lines[index].startswith("    ") and not lines[index - 1] and not before.startswith(" "):
                lines[index:index] = ["::", ""]
        lines[:] = GoogleDocstring(lines, Config(), app, what, name, value, options).lines()
