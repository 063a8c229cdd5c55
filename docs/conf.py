"""How is the documentation built? `make docs` runs Sphinx on these pages; every warning is an error."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import reference  # noqa: E402 - stands next to this file, which the line above puts on the path

project = "opusim"
author = copyright = "The opusim authors"
release = re.search(r"^version = (.+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)[1]  # type: ignore[index]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "mathml",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "jupyter_execute"]
templates_path: list[str] = []
autosummary_generate = (
    False  # the tables of api.md link to the entries, which stand on a page for each section
)
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.txt"),
    "numpy": ("https://numpy.org/doc/stable/", "inventories/numpy.txt"),
    "sklearn": ("https://scikit-learn.org/stable/", "inventories/sklearn.txt"),
}
intersphinx_disabled_reftypes = ["std:doc"]
nitpicky = False  # docstrings name types in plain words

smartquotes_action = "qe"  # two hyphens stay two, since options begin with them

html_theme = "furo"
html_title = f"opusim {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_js_files = ["keyboard.js"]
pygments_style = "a11y-high-contrast-light"  # tests/test_site.py computes their contrast
pygments_dark_style = "a11y-high-contrast-dark"
html_show_sphinx = False
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]
nb_execution_mode = "off"  # `make notebooks` executes them; their outputs are kept

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

default_role = "code"  # docstrings write `name` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute that is also a property is described once

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
    if what == "property":
        lines.insert(0, "")  # napoleon would take what stands before a colon in the first line for a type


_GENERATED = DOCS / "generated"
_SHOWN = {
    file: _GENERATED / f"{'-'.join(file.relative_to(ROOT).parent.parts) or file.stem.lower()}.md"
    for file in (
        *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")),
        *sorted(ROOT.glob("benchmarks/**/README.md")),
    )
}
"""Files of the repository that the site shows as pages."""
_LINKED = _SHOWN | {ROOT / file: _GENERATED / f"{name}.md" for name, (_, file) in reference.PAGES.items()}
"""These, and the sources whose links lead to the reference that is written from them."""


def _linked(text: str, file: Path, page: Path) -> str:
    """Turn the links that are right in a file of the repository into those of a page of the site."""

    def link(match: re.Match[str]) -> str:
        words, name, anchor = match.groups()
        target = (file.parent / name).resolve()
        if target.is_dir() or (
            target.suffix == ".md" and DOCS not in target.parents and target not in _LINKED
        ):
            return words
        return f"[{words}]({os.path.relpath(_LINKED.get(target, target), page.parent)}{anchor or ''})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]+)?\)", link, text)


def _show_files(app: Any) -> None:
    """Write the pages that show files of the repository, and the reference; parts stand below their index."""
    _GENERATED.mkdir(exist_ok=True)
    for old in _GENERATED.glob("*.md"):
        old.unlink()
    reference.write_reference(_GENERATED)
    for file, page in _SHOWN.items():
        page.write_text(_linked(file.read_text(), file, page))
    folders = [page.stem for page in _SHOWN.values() if page.stem.startswith("benchmarks-")]
    with (_GENERATED / "benchmarks.md").open("a") as index:
        index.write(reference.toctree(folders))
    for name, text in reference.api_sections((DOCS / "api.md").read_text()).items():
        page = _GENERATED / f"{name}.md"
        page.write_text(_linked(text, DOCS / "api.md", page))


def _with_tables(text: str) -> str:
    """Put a table of names and first lines in the place of the entries of each section of the API page."""

    def table(match: re.Match[str]) -> str:
        names = re.findall(r"^\.\. auto\w+:: ([\w.]+)", match[0], re.MULTILINE)
        return "\n".join(("```{eval-rst}", ".. autosummary::", "", *(f"   {name}" for name in names), "```"))

    return re.sub(r"^```\{eval-rst\}\n.*?^```$", table, text, flags=re.MULTILINE | re.DOTALL)


def _repository_links(app: Any, page: str, source: list[str]) -> None:
    """Point links to files that the site shows at their pages, and show tables on the index of the API."""
    file = DOCS / f"{page}.md"
    if page == "api":
        parts = [f"generated/{name}" for name in reference.api_sections(source[0])]
        source[0] = _with_tables(source[0]) + reference.toctree(parts)
    if _GENERATED not in file.parents:
        source[0] = _linked(source[0], file, file)


def setup(app: Any) -> None:
    """Register the hooks; that of docstrings before napoleon's, which has priority 500."""
    app.connect("builder-inited", _show_files)
    app.connect("source-read", _repository_links)
    app.connect("autodoc-process-docstring", _plain_docstring, priority=100)
