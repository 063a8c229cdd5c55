"""The site can be read by everybody: pictures have alternative texts, and colours the contrast of WCAG 2.1 AA."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("benchmarks/**/README.md")))
TEMPLATES = sorted((ROOT / "opusim" / "templates").glob("*.html"))
LEAST = 4.5
"""Contrast of text and its background (WCAG 2.1, success criterion 1.4.3, level AA)."""
TEXTS = ("foreground-primary", "foreground-secondary", "brand-content", "brand-visited")
TEXTS += ("api-keyword", "problematic")
"""Furo's colours of text, links and code on a page; tables have those of text."""
GROUNDS = ("background-primary", "background-secondary")


def luminance(colour: str) -> float:
    """Relative luminance of a colour #rgb or #rrggbb (WCAG 2.1)."""
    digits = colour.lstrip("#")
    digits = "".join(2 * each for each in digits) if len(digits) == 3 else digits[:6]
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """(L1 + 0.05) / (L2 + 0.05) of the lighter and the darker colour, 1 to 21."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#fff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)  # the grey that just fails
    assert contrast("#767676", "#fff") == pytest.approx(4.542, abs=1e-3)  # and the one that just passes


def theme_colours(*, dark: bool) -> dict[str, str]:
    """The colours of the theme by their variables, resolved."""
    furo = pytest.importorskip("furo", reason="the site's theme comes with `make docs`")
    style = (Path(furo.__file__).parent / "theme" / "furo" / "static" / "styles" / "furo.css").read_text()
    block = r"(?:^|\})\s*(body(?:\[data-theme=dark\])?)\{([^{}]*--color-foreground-primary[^{}]*)\}"
    blocks = re.findall(block, style)
    values: dict[str, str] = {}
    for selector, block in blocks:
        if dark or selector == "body":
            values |= dict(re.findall(r"--color-([\w-]+):([^;]+)", block))
    named = {"black": "#000000", "white": "#ffffff"}

    def resolved(value: str) -> str:
        inner = re.fullmatch(r"var\(--color-([\w-]+)\)", value)
        return resolved(values[inner[1]]) if inner else named.get(value, value)

    return {name: resolved(value) for name, value in values.items()}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_themes_text_links_and_code_are_readable(dark: bool) -> None:
    colours = theme_colours(dark=dark)
    found = {(text, ground): contrast(colours[text], colours[ground]) for text in TEXTS for ground in GROUNDS}
    assert {pair: value for pair, value in found.items() if value < LEAST} == {}
    assert contrast(colours["background-border"], colours["background-primary"]) < LEAST  # no text


@pytest.mark.parametrize("key", ["pygments_style", "pygments_dark_style"])
def test_highlighted_code_is_readable(key: str) -> None:
    styles = pytest.importorskip("pygments.styles")
    pytest.importorskip("a11y_pygments", reason="the site's code styles come with `make docs`")
    (name,) = re.findall(rf'^{key} = "(.+?)"', (ROOT / "docs" / "conf.py").read_text(), re.MULTILINE)
    assert len(unreadable(styles.get_style_by_name(name))) == 0
    assert unreadable(styles.get_style_by_name("native"))  # its white space is too dark


def unreadable(style: Any) -> dict[str, str]:
    """Tokens of a style of code whose colour has too little contrast with its ground."""
    found = {str(token): rule["color"] for token, rule in style if rule["color"] and not rule["bgcolor"]}
    assert len(set(found.values())) > 3
    return {token: each for token, each in found.items() if contrast(each, style.background_color) < LEAST}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.stem)
def test_reports_are_readable(template: Path) -> None:
    text = template.read_text()
    for colour in re.findall(r"[^-]color: *(#\w{3,6})", text):
        for ground in ("#ffffff", *re.findall(r"background: *(#\w{3,6})\b", text)):
            assert contrast(colour, ground) >= LEAST, (colour, ground)
    assert [tag for tag in re.findall(r"<img[^>]*>", text) if not re.search(r'alt="[^"]{8,}', tag)] == []


def without_alternative(text: str) -> list[str]:
    """Pictures of a page whose alternative text is missing, too short to say anything, or only the file's name."""
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text)
    return [file for words, file in pictures if len(words.split()) < 4 or Path(file).name in words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pictures_have_alternative_texts(page: Path) -> None:
    assert without_alternative(page.read_text()) == []


def test_missing_alternative_texts_are_found() -> None:
    text = "![](a.png) ![Curve](b.png) ![see c.png for the curve](c.png) ![Accuracy against epsilon, falling](d.png)"
    assert without_alternative(text) == ["a.png", "b.png", "c.png"]
