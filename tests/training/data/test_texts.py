"""Texts as data: windows, the held-out end, bytes and tokenizers, limits."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import opusim
import opusim.training.runs.run
from opusim.accounting.guarantee import NoGuarantee
from opusim.errors import ConfigError
from opusim.training.config import load_config
from opusim.training.data import Dataset, catalogue
from opusim.training.data.catalogue import bits_per_byte, load_text
from opusim.training.engine.plan import load_data
from opusim.training.errors import DataError
from opusim.training.protections.base import require_covered
from opusim.training.runs.run import evaluate_run

TEXT = "".join(f"{n} kettles, naïve ones. \n" for n in range(60))
BYTES = len(TEXT.encode())
TOKENIZER = {
    "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None, "decoder": None,
    "model": {
        "type": "WordLevel", "vocab": {"?": 0, "kettles": 1, ",": 2, "naïve": 3, "ones": 4, ".": 9}, "unk_token": "?",
    },
}  # fmt: skip
"""Six words, one with a number that leaves a gap, and a truncation to four tokens, which has to be ignored."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "kettles.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER))
    return path


def _bytes_of(part: Any) -> bytes:
    """The text of a part, whose windows hold each token once."""
    return bytes(torch.cat([part.x, part.y[:, -1:]], dim=1).reshape(-1).tolist())


class TestBytes:
    def test_windows_follow_each_other_and_the_end_is_held_out(self, text: Path) -> None:
        data = load_text(text, context=15, validation_fraction=0.25)
        content = TEXT.encode()
        train, validation = _bytes_of(data.train), _bytes_of(data.validation)
        assert content.startswith(train)
        assert validation in content[len(train) :]
        assert len(content) - len(train) - len(validation) < 2 * 16
        assert torch.equal(data.train.x[:, 1:], data.train.y[:, :-1])
        assert abs(data.origin["bytes"]["validation"] - 0.25 * len(content)) < 4
        assert (data.n_classes, data.vocabulary) == (256, 256)
        assert (data.record_shape, data.target) == ((15,), "tokens")
        assert (data.split, data.test, data.name) == ("tail", None, f"text:{text}")

    def test_a_leak_of_neighbouring_windows_would_be_seen(self, text: Path) -> None:
        data = load_text(text, context=15, validation_fraction=0.25)
        swapped = torch.cat([data.validation.x, data.train.x])[: len(data.train)]
        assert not TEXT.encode().startswith(bytes(swapped.reshape(-1).tolist()))

    def test_the_cut_spares_characters(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes("€".encode() * 40)
        for share in (0.3, 0.31, 0.32):
            data = load_text(path, context=1, validation_fraction=share)
            assert data.origin["bytes"]["train"] % 3 == 0

    def test_bytes_are_counted_by_part(self, text: Path) -> None:
        data = load_text(text, context=9, test=text, validation_fraction=0.0)
        assert data.origin["bytes"] == data.origin["tokens"] == {"train": BYTES, "test": BYTES}
        assert data.origin["bytes_per_token"] == {"train": 1.0, "test": 1.0}
        assert data.validation.x.shape == (0, 9)

    def test_any_bytes_are_a_text(self, tmp_path: Path) -> None:
        path = tmp_path / "a.bin"
        path.write_bytes(bytes(range(256)) * 4)
        assert int(load_text(path, context=3, validation_fraction=0).train.y.max()) == 255


class TestTokenizer:
    def test_words_are_tokens_in_their_order(self, text: Path, tokenizer: Path) -> None:
        data = load_text(text, context=5, tokenizer=tokenizer, validation_fraction=0.0)
        assert torch.cat([data.train.x[0], data.train.y[0, -1:]]).tolist() == [0, 1, 2, 3, 4, 9]
        assert (data.n_classes, data.origin["tokens"]) == (10, {"train": 360})
        assert data.origin["bytes_per_token"]["train"] == BYTES / 360

    def test_pieces_end_at_lines(self, text: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = load_text(text, context=5, tokenizer=tokenizer)
        monkeypatch.setattr(catalogue, "_PIECE", 40)
        assert torch.equal(load_text(text, context=5, tokenizer=tokenizer).train.x, whole.train.x)

    def test_another_tokenizer_is_another_origin(self, text: Path, tokenizer: Path) -> None:
        before = load_text(text, context=5, tokenizer=tokenizer).origin["tokenizer"]
        tokenizer.write_text(tokenizer.read_text() + "\n")
        assert load_text(text, context=5, tokenizer=tokenizer).origin["tokenizer"] != before

    def test_a_missing_library_names_its_extra(self, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'opusim\[llm\]'"):
            load_text(text, tokenizer=text)


def test_bits_per_byte_of_a_uniform_guess() -> None:
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8.0)
    assert bits_per_byte(math.log(1024), 2.5) == pytest.approx(4.0)


class TestEvaluation:
    @pytest.fixture
    def path(self, text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A run on the text, whose model guesses all bytes with the same probability."""
        config = load_config({"data": {"name": f"text:{text}", "context": 5, "test": str(text)}})
        run = SimpleNamespace(
            config=config, folder=SimpleNamespace(path="run"), facts={"data": {"origin": {"tokenizer": None}}},
            n_features=5, evaluate=lambda x, y: {"loss": math.log(256), "shape": x.shape},
        )  # fmt: skip
        monkeypatch.setattr(opusim.training.runs.run, "load_run", lambda path, **options: run)
        self.run = run
        return text

    def test_own_test_records_are_those_of_the_configuration(self, path: Path) -> None:
        figures = evaluate_run(path)
        assert (figures["data"], figures["records"], figures["shape"]) == (path.name, 258, (258, 5))
        assert figures["bits_per_byte"] == pytest.approx(8.0)

    def test_another_text_is_taken_whole(self, path: Path) -> None:
        other = path.with_name("other.txt")
        other.write_text(TEXT[:700], encoding="utf-8")
        assert evaluate_run(path, data=f"text:{other}")["records"] == len(TEXT[:700].encode()) // 6

    def test_the_text_of_the_training_is_named_as_such(self, path: Path) -> None:
        self.run.config = self.run.config.unchecked(data={"test": None})
        figures = evaluate_run(path, data=f"text:{path}")
        assert (figures["data"], figures["records"]) == (f"{path.name}, on which the run was trained", 258)

    def test_a_tokenizer_that_was_changed_is_refused(self, path: Path) -> None:
        self.run.facts["data"]["origin"]["tokenizer"] = "a digest"
        with pytest.raises(DataError, match="data.tokenizer = .* is not the file that run run was trained"):
            evaluate_run(path)

    def test_data_of_another_size_are_refused(self, path: Path) -> None:
        with pytest.raises(DataError, match="data set digits has 64 features, the run's network takes 5"):
            evaluate_run(path, data="digits")


@pytest.mark.parametrize("relation", ["zero_out", "replace_one", "add_or_remove_one"])
def test_a_guarantee_covers_a_text_whose_windows_do_not_move(text: Path, relation: str) -> None:
    """An added record would move the cut between the parts of the text."""
    private = {"kind": "record", "noise_multiplier": 1.0, "relation": relation, "divisor": 8.0}
    sampler = {"scheme": "poisson", "sampling_probability": 0.1}
    config = load_config(
        {"trainer": {"kind": "bp"}, "data": {"name": f"text:{text}"}, "protection": private, "sampler": sampler}
    )  # fmt: skip
    data = load_text(text, context=5)
    if relation == "add_or_remove_one":
        with pytest.raises(NoGuarantee, match="'tail' does not fit .*would move the cut between the"):
            require_covered(config, data, "poisson")
    else:
        require_covered(config, data, "poisson")


class TestRefusals:
    def test_what_cannot_be_read_is_named(
        self, text: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        binary = tmp_path / "a.bin"
        binary.write_bytes(b"\xff" * 900)
        refused: list[tuple[dict[str, Any], str]] = [
            ({"path": tmp_path / "none.txt"}, "none.txt cannot be read (No such file or directory)"),
            ({"path": tmp_path}, "cannot be read"),
            ({"context": 2000}, "one window takes data.context + 1 = 2001; lower data.context"),
            ({"test": text, "context": 200, "validation_fraction": 0.01}, "(validation) has"),
            ({"tokenizer": text}, "is no tokenizer.json"),
            ({"path": binary, "tokenizer": tokenizer}, "is not UTF-8 text"),
        ]
        for changes, message in refused:
            with pytest.raises(DataError, match=re.escape(message)):
                load_text(**({"path": text} | changes))
        monkeypatch.setattr(catalogue, "TEXT_LIMIT", 1000)
        with pytest.raises(DataError, match="has 1,550 bytes, more than the limit of 1,000"):
            load_text(text)

    def test_a_file_needs_its_path(self) -> None:
        with pytest.raises(ConfigError, match="lacks the path of the file; give text:PATH"):
            load_config({"data": {"name": "text:"}})


def test_a_configuration_names_a_text(text: Path, tokenizer: Path) -> None:
    keys = {"name": f"text:{text}", "tokenizer": str(tokenizer), "context": 5, "test": str(text)}
    config = load_config({"data": keys | {"validation_fraction": 0.2}})
    data: Dataset = load_data(config, None)
    assert config.data.short_name == "kettles"
    assert data.test is not None
    assert (data.n_features, data.n_classes, len(data.test)) == (5, 10, 60)
