"""The benchmarks of photonic DFA at a small size: they resume, and fill their rows of the papers' page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pdfa import figure2
from benchmarks.pdfa import table1 as pdfa_table1
from benchmarks.results_file import load_results
from tests.support.paper_data import ours, trains_nothing, write_mnist

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_pdfa_figure2(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 300)
    (results.parent / "MNIST").rename(results.parent / "FashionMNIST")
    monkeypatch.setattr(pdfa_table1, "BASE", {**pdfa_table1.BASE, "epochs": 1})
    for module in (pdfa_table1, figure2):
        monkeypatch.setattr(module, "COLUMNS", ("non-private", "0", "0.2"))
    monkeypatch.setattr(figure2, "SIGMAS", (0.0, 0.2))
    monkeypatch.setattr(pdfa_table1, "SEEDS", (0, 1))
    monkeypatch.setattr(figure2, "PICTURE", results.parent / "figure.png")
    assert ours("Photonic", "Figure 2")[0] == "queued"
    pdfa_table1.main(jobs=1, seeds="0")
    assert ours("Photonic", "Figure 2")[0] == "smaller"
    pdfa_table1.main(jobs=1, seeds="0,1")
    found = load_results(pdfa_table1.NAME)
    assert len(found["runs"]) == 24
    assert len(found["cells"]) == 12
    trains_nothing(lambda: pdfa_table1.main(jobs=1, seeds="0,1"), monkeypatch)
    assert load_results(pdfa_table1.NAME) == found
    figure2.draw()
    assert figure2.PICTURE.exists()


@pytest.mark.slow
def test_the_demo_trains_side_by_side_and_writes_its_report(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "opu.toml", tmp_path / "examples")
    command = [sys.executable, "-m", "benchmarks.pdfa.demo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    assert "pdfa, sigma 30" in shown.stdout
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 10_000
