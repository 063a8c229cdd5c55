"""Show results: tables of text that never break a word, amounts in the unit that a reader would choose, HTML pages.

If a page is too narrow for a table, or a row of it would be tall, its rows are printed below each other. The unit of a
number is read from the end of its key (`unit_of`).
"""

from __future__ import annotations

import base64
import html
import io
import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opusim.plugins import Deferred

if TYPE_CHECKING:
    from matplotlib.figure import Figure

jinja2, matplotlib = Deferred("jinja2"), Deferred("matplotlib.figure")

_NO_TERMINAL = 140
"""Columns if the output is no terminal and COLUMNS is not set."""
_WIDEST_TEXT = 120
_MOST_LINES = 8
"""Lines of a row above which rows are printed below each other."""


def output_width() -> int:
    """Return columns of standard output: the terminal's, or COLUMNS, or 140."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) > 0 else _NO_TERMINAL


def wrapped(text: str, *, indent: str = "", widest: int = _WIDEST_TEXT) -> str:
    """Return a paragraph as wide as the output, at most `widest`, with `indent` before each line but the first."""
    return fill(
        text,
        width=min(output_width(), widest),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of text, under a title unless that is empty; brackets in it are no markup."""
    table = _table(title, columns, rows)
    print(table) if isinstance(table, str) else Console(width=output_width()).print(table)


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table that `print_table` prints without a title and colours; it ends in a line break."""
    table = _table("", columns, rows)
    if isinstance(table, str):
        return f"{table}\n"
    page = io.StringIO()
    # in a notebook rich would display the table at once, and under FORCE_COLOR write codes into the text
    Console(width=output_width(), file=page, force_jupyter=False, color_system=None).print(table)
    return page.getvalue()


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | str:
    """Return a table as wide as the output, or its rows below each other if it would be too wide or a row too tall."""
    widths = column_widths([columns, *rows], output_width())
    if widths is None or any(
        len(wrap(cell, size)) > _MOST_LINES for row in rows for cell, size in zip(row, widths, strict=True)
    ):
        return as_records(title, columns, rows)
    table = Table(title=escape(title) or None)
    for column, size in zip(columns, widths, strict=True):
        table.add_column(escape(column), width=size, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def column_widths(cells: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Widths that hold the longest word of each column, the rest shared by need; None if the page is too narrow."""
    columns = list(zip(*cells, strict=True))
    widths = [max((len(word) for cell in column for word in cell.split()), default=1) for column in columns]
    wanted = [max(len(cell) for cell in column) for column in columns]
    left = width - 1 - sum(size + 3 for size in widths)
    if left < 0:
        return None
    while left and (short := [n for n, size in enumerate(widths) if size < wanted[n]]):
        for number in short[:left]:
            widths[number] += 1
        left -= min(left, len(short))
    return widths


def as_records(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows below each other, a line for each cell that holds something."""
    blocks = [
        "\n".join(
            wrapped(f"{column}: {cell}" if column else cell, indent="  ")
            for column, cell in zip(columns, row, strict=True)
            if cell
        )
        for row in rows
    ]
    return "\n\n".join([title, *blocks] if title else blocks) + "\n"


_UNITS = {
    **{"us": "µs", "pm": "pm", "rad": "rad", "pixels": "pixels", "w": "W", "mib": "MiB", "c": "°C"},
    **{"k": "K", "e_per_s": "e⁻/s", "variance_per_e": "projection units²/e⁻", "sigma": "projection units"},
    **{"sigma_0": "projection units", "per_s": "1/s", "e": "e⁻", "e_low": "e⁻", "e_high": "e⁻"},
    **{"std": "projection units", "dn": "DN", "gain_dn_per_e": "DN/e⁻", "bits": "bits"},
    **{"adc_bound": "units of w x", "ohm": "Ω", "hz": "Hz", "ghz": "GHz", "ghz_per_k": "GHz/K"},
    **{"db": "dB", "a_per_w": "A/W", "heater_crosstalk": "of the neighbour's shift"},
    **{"tuning_std": "of a weight of 1", "prnu": "of the response", "light_noise": "of the light"},
    **{"linearity_error": "of the response", "s": "s", "temperatures_c": "°C"},
    **{"quantum_efficiency": "e⁻/photon", "anchor_flux_per_s": "photons/s"},
    **{"bias_flux_per_s": "photons/s", "ambient_flux_per_s": "photons/s", "rms": "of the power"},
    **{"drift_rms": "of the power", "contrast": "of intensities", "stuck_on": "of the mirrors"},
    **{"stuck_off": "of the mirrors", "hot_share": "of the pixels", "dead_share": "of the pixels"},
    **{"hot_factor": "of the dark current", "dcnu": "of the dark current"},
    **{"crosstalk": "of the electrons", "nonlinearity": "at saturation", "dropped": "of the frames"},
    **{"repeated": "of the frames", "reanchor_steps": "steps", "us_per_output": "µs", "mb_s": "MB/s"},
    **{"lowest": "of the mean", "highest": "of the mean"},
}
"""Unit of a key by its whole last word or its suffix; the longest match counts."""
_CROSSBAR_UNITS = {
    **{"g_max_us": "µS", "programming_us": "µS", "polynomials_us": "µS", "dac_bits": "bits"},
    **{"adc_bits": "bits", "adc_bound": "units of w x", "output_std": "units of w x"},
    **{"weight_std": "of a weight of 1", "current_std": "of a weight of 1", "times_s": "s", "t0_s": "s"},
    **{"t_read_s": "s", "programming_us_per_row": "µs", "programming_nj_per_device": "nJ"},
}
"""Units of the section ``crossbar``, whose conductances are in microsiemens, by the last word."""


def unit_of(key: str) -> str:
    """Return the unit that a key's name ends in, or nothing for a count.

    >>> unit_of("camera.light.exposure_us")
    'µs'
    """
    last = key.rsplit(".", 1)[-1]
    if key.startswith("crossbar."):
        return _CROSSBAR_UNITS.get(last, "")
    matches = [suffix for suffix in _UNITS if last == suffix or last.endswith(f"_{suffix}")]
    return _UNITS[max(matches, key=len)] if matches else ""


def duration(seconds: float) -> str:
    """Return seconds in the unit that a reader would take: 7.4 s, 42 s, 3.5 min, 12.6 h, 3.2 days.

    >>> duration(45_402)
    '12.6 h'
    """
    if seconds < 100:
        digits = ".2g" if 0 < seconds < 0.95 else ".1f" if 0 < seconds < 9.95 else ".0f"
        return f"{seconds:{digits}} s"
    for limit, unit, size in ((6000, "min", 60.0), (172_800, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86_400:,.1f} days"


def energy(joules: float) -> str:
    """Return joules in the unit that a reader would take: 0.39 J, 78 J, 1.36 MJ.

    >>> energy(1_362_060)
    '1.36 MJ'
    """
    for limit, size, unit in ((1e9, 1e9, "GJ"), (1e6, 1e6, "MJ"), (1e4, 1e3, "kJ")):
        if joules >= limit:
            return f"{joules / size:.3g} {unit}"
    return f"{joules:,.0f} J" if joules >= 100 or joules == 0 else f"{joules:.3g} J"


def data_size(n_bytes: int) -> str:
    """Return a number of bytes in the unit that a reader would take: 512 B, 27 KiB, 1.4 MiB, 310 GiB.

    >>> data_size(1_468_006)
    '1.4 MiB'
    """
    if n_bytes < 1024:
        return f"{n_bytes} B"
    amount, unit = n_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if amount < 1023.5:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.1f} {unit}" if amount < 9.95 else f"{amount:,.0f} {unit}"


class Shown:
    """Shows itself in one line in a terminal, and as a table of two columns in a notebook."""

    def _shown(self) -> dict[str, object]:
        """Return the shown values by name, in the order of importance; None is left out."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return the class and the shown values."""
        parts = [f"{name}={value}" for name, value in self._shown().items() if value is not None]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return the shown values as a table, for a notebook."""
        shown = self._shown().items()
        rows = [(name.replace("_", " "), str(value)) for name, value in shown if value is not None]
        return html_table((type(self).__name__, ""), rows)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as HTML, for a notebook; the cells are escaped."""

    def line(tag: str, cells: Sequence[object]) -> str:
        inner = "".join(f'<{tag} style="text-align:left">{html.escape(str(cell))}</{tag}>' for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', columns)}</thead><tbody>{body}</tbody></table>"


def html_page(template: str, **values: Any) -> str:
    """Return a page made from one of the templates in `opusim/templates`."""
    return str(_templates().get_template(template).render(**values))


@cache
def _templates() -> Any:
    """Return the templates, each of which is compiled once."""
    loader = jinja2.PackageLoader("opusim")
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)


def data_url(picture: bytes, kind: str = "image/png") -> str:
    """Return a picture as a data URL, which keeps a page self-contained."""
    return f"data:{kind};base64,{base64.b64encode(picture).decode()}"


@cache
def _figure_class() -> Any:
    """Return a subclass of matplotlib's figure that a notebook shows without pyplot."""

    class ShownFigure(matplotlib.Figure):  # type: ignore[name-defined]
        """A figure that shows itself."""

        def _repr_png_(self) -> bytes:
            return png_bytes(self)

    return ShownFigure


def blank_figure(width: float, height: float) -> Figure:
    """Return a figure without axes, drawn without a display, which a notebook shows; sizes in inches."""
    figure: Figure = _figure_class()(figsize=(width, height), layout="constrained")
    return figure


def png_bytes(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
