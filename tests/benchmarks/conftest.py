"""A folder of results for each test of the benchmarks."""

from pathlib import Path

import pytest

from benchmarks import results_file


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of results, which the commands fill; they run in, and read data from, a folder of their own."""
    monkeypatch.setattr(results_file, "FOLDER", tmp_path / "results")
    monkeypatch.setenv("OPUSIM_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"
