"""Language models under zeroth-order training: prompts, padding, LoRA, runs and their way back."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import training
from training.data.errors import DataError
from training.zo.language import Lora, load_classifier
from training.zo.prompts import PAD, Prompt, class_tokens, encode, read_texts
from training.zo.replay import replay

pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parent))
from tiny_language import LABELS, TEXTS, make

CAUSAL, MASKED = Prompt(), Prompt(template="{text} It was {mask}")
KINDS = {"gpt2": CAUSAL, "opt": CAUSAL, "bert": MASKED}
TARGETS = {"gpt2": ("c_attn",), "opt": ("q_proj", "v_proj"), "bert": ("query", "value")}
CONFIG = {
    "epochs": 2,
    "threads": 1,
    "data": {"n_classes": 2, "validation_fraction": 0.0},
    "sampler": {"scheme": "poisson", "batch_size": 6},
    "trainer": {"kind": "zo"},
    "protection": {"kind": "record", "noise_multiplier": 1.0},
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_scores_are_the_logits_of_the_class_words(tmp_path: Path, kind: str) -> None:
    """Against the model of transformers on one prompt without any padding; padding changes nothing but roundings."""
    prompt = KINDS[kind]
    model, tokenizer = load_classifier(make(tmp_path, kind), prompt, local_only=True)
    encoded = encode(tokenizer, TEXTS, prompt)
    scores = model(encoded)
    assert scores.shape == (len(TEXTS), 2)
    tokens = [tokenizer.convert_tokens_to_ids(word) for word in ("terrible", "great")]
    for number in (0, 2, 5):
        ids = encoded[number][encoded[number] != PAD].long()[None]
        logits = model.model(input_ids=ids).logits[0]
        place = int((ids[0] == tokenizer.mask_token_id).nonzero()) if prompt.masked else -1
        assert torch.allclose(scores[number], logits[place, tokens], atol=1e-5)
        assert not torch.allclose(scores[number], logits[place, tokens[::-1]], atol=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_learns_is_replayed_and_read_back(tmp_path: Path, kind: str, lora: bool) -> None:
    prompt = KINDS[kind]
    wanted = Lora(rank=2, targets=TARGETS[kind]) if lora else None
    model, tokenizer = load_classifier(make(tmp_path / "model", kind), prompt, lora=wanted)
    x, y = encode(tokenizer, TEXTS, prompt), np.array(LABELS)
    before = model(x).detach()
    trained = training.train(CONFIG, data=(x, y), model=model, folder=tmp_path / "run")
    names = list(replay(trained.folder.path).tensors)
    assert all(("lora_" in name) == lora for name in names)
    assert not torch.equal(model(x).detach(), before)
    again = training.load_run(trained.folder.path)  # the folder knows the model's own folder
    assert (again.predict(x) == trained.predict(x)).all()
    assert 0 <= again.evaluate(x, y)["accuracy"] <= 1
    assert trained.guarantees[0].is_proven


def test_lora_starts_where_the_model_is_and_is_float32(tmp_path: Path) -> None:
    folder = make(tmp_path, "opt")
    whole, tokenizer = load_classifier(folder, CAUSAL)
    part, _ = load_classifier(folder, CAUSAL, lora=Lora(rank=2), dtype="bfloat16")
    x = encode(tokenizer, TEXTS, CAUSAL)
    assert torch.allclose(whole(x), part(x).float(), atol=0.02)
    kinds = {p.dtype for p in part.parameters() if p.requires_grad}
    assert kinds == {torch.float32}


def test_long_texts_lose_their_end_not_the_question(tmp_path: Path) -> None:
    _, tokenizer = load_classifier(make(tmp_path), CAUSAL)
    encoded = encode(tokenizer, ["good " * 50], Prompt(max_tokens=10))
    assert encoded.shape == (1, 10)
    assert tokenizer.decode(encoded[0, -2:].long().tolist()) == "it was"


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    _, tokenizer = load_classifier(make(tmp_path / "m"), CAUSAL)
    with pytest.raises(ValueError, match="classes: 'wonderful' is 1 tokens, or unknown"):
        class_tokens(tokenizer, Prompt(classes=("great", "wonderful")))
    with pytest.raises(ValueError, match="classes: 'very good' is 2 tokens"):
        class_tokens(tokenizer, Prompt(classes=("great", "very good")))
    with pytest.raises(ValueError, match=r"must hold \{text\} once"):
        Prompt(template="It was")
    with pytest.raises(ValueError, match="language model .*nowhere: cannot be loaded"):
        load_classifier(tmp_path / "nowhere", CAUSAL, local_only=True)
    file = tmp_path / "texts.tsv"
    file.write_text("good film\t1\nno label\n")
    with pytest.raises(DataError, match="line 2 is not: text, tab, class number"):
        read_texts(file)


def test_the_command_fine_tunes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.cli import main

    folder = make(tmp_path / "model", "opt")
    lines = [f"{text}\t{label}" for text, label in zip(TEXTS, LABELS, strict=True)]
    (tmp_path / "texts.tsv").write_text("\n".join(lines) + "\n")
    arguments = ["train", "zo", "--language-model", str(folder), "--text", str(tmp_path / "texts.tsv")]
    arguments += ["--lora-rank", "2", "--protect", "record", "--epsilon", "8", "--epochs", "1", "--quiet"]
    arguments += ["--set", "sampler.batch_size=6", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["opusim", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code in (0, None)
    assert training.load_run(tmp_path / "run").guarantees[0].epsilon <= 8
