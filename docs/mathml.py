"""A Sphinx extension that writes formulas as MathML, which browsers read without a script and without the network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

_LOG = logging.getLogger(__name__)
_WIDE = 40
"""Characters of LaTeX above which a formula in a line may be wider than a narrow screen."""


def mathml(tex: str, node: nodes.Node, *, display: bool) -> str:
    """Return a formula as MathML; one that docutils cannot convert is a warning at its place in the page."""
    try:
        return latex2mathml.tex2mathml(tex, as_block=display)
    except MathError as error:
        _LOG.warning("formula %r: %s", tex, error, location=node)
        return ""


def _inline(self: Any, node: nodes.math) -> None:
    tex = node.astext()
    wide = ' class="wide"' if len(tex) > _WIDE else ""
    self.body.append(f"<span{wide}>{mathml(tex, node, display=False)}</span>")
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(mathml(node.astext(), node, display=True) + "</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
