"""Theorems by name: each guarantee cites one that an installed package can show, and whose code and page exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from opusim.accounting import RecordCentral, Theorem, guarantees
from opusim.accounting.cli import explain_command
from opusim.accounting.explanation import explain_theorem
from opusim.accounting.theorems import known_theorems, theorem

ROOT = Path(__file__).parents[2]
THEOREMS = known_theorems()


def _stands(page: str) -> bool:
    """Whether a page of the documentation has the sections that are named."""
    name, _, place = page.partition(", ")
    text = (ROOT / "docs" / name).read_text()
    numbers = re.findall(r"\d+", place)
    if not numbers:
        return f"## {place}" in text
    return all(re.search(rf"^## {number}\. ", text, re.MULTILINE) for number in numbers)


@pytest.mark.parametrize("found", THEOREMS, ids=lambda found: found.name)
def test_every_theorem_is_complete_and_its_code_exists(found: Theorem) -> None:
    assert found.statement
    assert found.proof
    assert _stands(found.page)
    module, _, name = found.code.rpartition(".")
    assert hasattr(import_module(module), name)
    text = explain_theorem(found)
    for part in (*found.checked_by_code, *found.trusted):
        assert part in text


def test_planted_sections_are_missed() -> None:
    assert not _stands("privacy-records.md, section 99")
    assert not _stands("forward-only.md, What is not guaranteed")


def test_the_source_of_a_guarantee_leads_to_its_theorem(capsys: pytest.CaptureFixture[str]) -> None:
    step = RecordCentral(noise_multiplier=2.0, sampling_probability=0.1, clip_norm=1.0, divisor=100)
    (guarantee,) = guarantees([step], delta=1e-5)
    name = guarantee.source.split()[1]
    assert guarantee.source.startswith(theorem(name).citation)
    assert "docs/" not in guarantee.source
    explain_command(name)
    assert "Poisson-sampled Gaussian mechanism with multiplier z" in " ".join(capsys.readouterr().out.split())


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    explain_command()
    out = capsys.readouterr().out
    assert all(found.name in out for found in THEOREMS)


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"theorem 'nothing': is not known; choose one of adaptive-clipped-records, "
    ):
        theorem("nothing")


def test_a_taken_name_is_refused() -> None:
    taken = vars(THEOREMS[0]) | {"title": "another"}
    with pytest.raises(ValueError, match="the name is taken"):
        Theorem(**taken)


def test_only_numerics_imports_scipy_and_dp_accounting() -> None:
    for path in (ROOT / "accounting").rglob("*.py"):
        modules = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
        }
        heavy = {name for name in modules if name.split(".")[0] in ("scipy", "dp_accounting")}
        assert not heavy or path.parent.name == "numerics", path
