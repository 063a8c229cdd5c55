"""Reference pages describe what exists; the pages' figures are those of benchmarks/results."""

import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer

import opusim
from benchmarks.pages import pages
from opusim.accounting.theorems import known_theorems
from opusim.description.schema import DeviceDescription
from opusim.training.cli.app import app
from opusim.training.config.run import load_config
from tests.support.imports import ROOT, imports_of

DOCS = Path(__file__).parents[1] / "docs"
INVENTORIES = sorted((DOCS / "inventories").glob("*.txt"))


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = loaded("reference")
COMMANDS = reference.commands_pages()
API = (DOCS / "api.md").read_text()
_ROWS_OF_A_PAGE = 250
"""Most rows of the tables of a page of commands; one page of all has 900."""


def silent(page: str) -> list[str]:
    """Rows of a page's tables that lack a meaning."""
    rows = re.findall(r"^\| (\[?`.+) \| *([^|]*(?:\\\|[^|]*)*) \|$", page, re.MULTILINE)
    return [row for row, meaning in rows if not meaning.strip()]


@pytest.mark.parametrize("page", list(reference.PAGES))
def test_every_row_has_a_meaning(page: str) -> None:
    text = reference.PAGES[page][0]()
    assert silent(text) == []
    assert len(re.findall(r"\n\| \[?`", text)) > 15
    assert silent(text + "| `key` | text | – |  |\n") == ["`key` | text | –"]


def test_every_key_of_a_device_is_listed() -> None:
    page = reference.device_description_page()
    for name, section in reference.description_sections(DeviceDescription):
        part = page.split(f"## `[{name}]`" if name else "## The file")[1].split("\n## ")[0]
        keys = {field.alias or key for key, field in section.model_fields.items()}
        assert set(re.findall(r"^\| `(\w+)`", part, re.MULTILINE)) == keys


def test_every_command_is_listed_on_pages_of_one_subject() -> None:
    found = {words for words, _ in reference.commands(typer.main.get_command(app))}
    assert {"opusim train pdfa", "opusim device calibrate", "opusim doctor"} <= found
    shown = [words for words, _ in reference.commands(typer.main.get_command(app))]
    titled = {name: re.findall(r"^##? (opusim [^,\n]+)$", text, re.M) for name, text in COMMANDS.items()}
    listed = dict(re.findall(r"^\| \[`(opusim .+?)`\]\(([\w-]+)\.md#", COMMANDS["commands"], re.MULTILINE))
    assert set(listed) == found == set(shown)
    assert [words for words, name in listed.items() if words not in titled[name]] == []
    rows = {name: len(re.findall(r"^\| `", text, re.MULTILINE)) for name, text in COMMANDS.items()}
    assert len(rows) > 15
    assert {name: count for name, count in rows.items() if count > _ROWS_OF_A_PAGE} == {}


def test_every_public_name_stands_on_a_page_of_its_section() -> None:
    entries = re.compile(r"^\.\. auto\w+:: (.+)$", re.MULTILINE)
    pages = reference.api_sections(API)
    assert len(pages) == API.count("\n## ") > 10
    assert [name for text in pages.values() for name in entries.findall(text)] == entries.findall(API)


def test_commands_show_what_is_taken_without_an_option() -> None:
    page = COMMANDS["commands-pdfa"].split("## opusim train pdfa\n")[1].split("\n## ")[0]
    shown = dict(re.findall(r"^\| `(--[\w-]+)`.*? \| (\S+) \|", page, re.MULTILINE))
    config = load_config({"trainer": {"kind": "pdfa"}})
    assert shown["--epochs"] == f"`{config.epochs}`"
    assert shown["--data"] == f'`"{config.data.name}"`'
    assert shown["--protect"] == f'`"{config.protection.kind}"`'
    assert (shown["--label"], shown["--release"]) == ("–", "–")


def test_every_theorem_is_listed_with_the_page_that_derives_it() -> None:
    page = reference.theorems_page()
    ours = {each.name: each.page for each in known_theorems() if each.code.startswith("opusim.accounting.")}
    assert len(ours) >= 20
    assert ours.keys() <= set(re.findall(r"^## ([a-z-]+)$", page, re.MULTILINE))
    assert [name for name, derived in ours.items() if not (DOCS / derived.split(",")[0]).exists()] == []


def test_public_names_of_all_layers_are_documented_with_a_summary() -> None:
    subjects = [opusim, *(getattr(opusim, name) for name in dir(opusim) if name not in opusim.__all__)]
    public = [(each, name) for each in subjects for name in getattr(each, "__all__", ())]
    assert len(public) > 100
    assert [name for each, name in public if not (getattr(each, name).__doc__ or "").strip()] == []


@pytest.mark.parametrize("file", INVENTORIES, ids=lambda file: file.stem)
def test_links_to_other_projects_name_what_exists(file: Path) -> None:
    head, *lines = file.read_text().splitlines()
    assert head == "# Sphinx inventory version 1"
    entries = [line.split() for line in lines if not line.startswith("#")]
    for name, kind, page in entries:
        module = name if "." in name else f"builtins.{name}"
        assert pkgutil.resolve_name(module) is not None
        assert kind in ("class", "exception")
        assert page.endswith(".html")


OURS = ("opusim", "benchmarks", "tests")


def missing(source: str) -> list[str]:
    """Names of this repository that a source text imports, at whatever place, and that do not exist."""
    found = []
    for name in {each.target for each in imports_of(source) if each.target.split(".")[0] in OURS}:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            found.append(name)
    return found


def test_pages_are_what_the_results_say() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name} is out of date; run `make bench-report`"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT))
)
def test_benchmarks_import_what_exists(file: Path) -> None:
    assert not missing(file.read_text())


def test_an_import_of_what_is_gone_is_caught() -> None:
    gone = (
        "def f():\n    from opusim.accounting import nothing_of_this_name\n    import opusim.training.nowhere"
    )
    assert sorted(missing(gone)) == ["opusim.accounting.nothing_of_this_name", "opusim.training.nowhere"]
