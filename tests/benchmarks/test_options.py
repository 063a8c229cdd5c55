"""Lists in the options of the benchmarks' commands."""

from pathlib import Path

import pytest
import typer

from benchmarks.options import listed, seeds_of
from benchmarks.ulr import resnet
from benchmarks.zeroth_order.sentences import read_sentences
from opusim.training.errors import DataError


def test_a_list_keeps_its_order_and_semicolons_part_names_with_commas() -> None:
    assert listed("--batches", "500, 64", (64, 200, 500)) == [500, 64]
    assert listed("--targets", "2,0.50", (0.5, 1.0, 2.0)) == [2.0, 0.5]
    assert listed("--rows", "", ("a", "b")) == ["a", "b"]
    assert listed("--names", "ulr, matched; ulr", tuple(resnet.PLAIN)) == ["ulr, matched", "ulr"]


@pytest.mark.parametrize("line", ["7", "x", "64,,200", "64;200", "nan"])
def test_what_may_not_stand_in_a_list_is_named(line: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is none of 64, 200, 500$") as caught:
        listed("--batches", line, (64, 200, 500))
    assert caught.value.param_hint == "--batches"


def test_seeds_are_whole_numbers() -> None:
    assert seeds_of("0, 12") == [0, 12]
    for line in ("a", "1.5", "-1", ""):
        with pytest.raises(typer.BadParameter, match="is no seed; give whole numbers from 0"):
            seeds_of(line)


def test_missing_sentences_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "SST2").mkdir()
    (tmp_path / "SST2" / "dev.tsv").write_text("good\t1\nbad\t0\n")
    monkeypatch.setenv("OPUSIM_DATA", str(tmp_path))
    assert read_sentences("dev").text == ["good", "bad"]
    with pytest.raises(DataError, match=r"lacks train\.tsv, test\.tsv; set OPUSIM_DATA"):
        read_sentences("train", "dev", "test")
