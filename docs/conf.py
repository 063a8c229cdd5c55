"""How is the documentation built? `make docs` runs Sphinx on these pages; every warning is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

project = "opusim"
author = copyright = "The opusim authors"
release = re.search(r"^version = (.+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)[1]  # type: ignore[index]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
nitpicky = False  # docstrings name types in plain words

html_theme = "furo"
html_title = f"opusim {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sphinx = False

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

default_role = "code"  # docstrings write `name` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

_CODE = re.compile(r"(``.*?``|`[^`\n]*`)")


def _escape(text: str) -> str:
    """Escape what reStructuredText would take for markup, outside of code."""
    return "".join(
        part if _CODE.fullmatch(part) else re.sub(r"([|*])|(?<=\w)_(?=\W|$)", r"\\\g<0>", part)
        for part in _CODE.split(text)
    )


def _plain_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with formulas, so that `|x|` and `B x * 2` mean what they say."""
    lines[:] = [_escape(line) for line in lines]


_SHOWN = {"benchmarks": "benchmarks/README.md", "contributing": "CONTRIBUTING.md"}
"""Pages of the site that show a file of the repository."""


def _repository_links(app: Any, page: str, source: list[str]) -> None:
    """Show files of the repository as pages, and point links that are right in the repository at these pages."""
    if page in _SHOWN:
        folder = Path(_SHOWN[page]).parent
        text = (ROOT / _SHOWN[page]).read_text()
        text = re.sub(r"\]\((?=[\w/.-]+[)#])(?!\.\./docs/|docs/)", f"](../{folder}/", text)
        source[0] = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    else:
        for name, file in _SHOWN.items():
            source[0] = source[0].replace(f"](../{file}", f"]({name}.md")


def setup(app: Any) -> None:
    """Register the hooks; that of docstrings before napoleon's, which has priority 500."""
    app.connect("source-read", _repository_links)
    app.connect("autodoc-process-docstring", _plain_docstring, priority=100)
