"""Language models under zeroth-order training: prompts, padding, LoRA, runs and resuming."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from opusim import training
from opusim.training.config import load_config
from opusim.training.engine.callbacks import Callback
from opusim.training.engine.loop import Engine
from opusim.training.errors import DataError, RunFolderError, RunInterrupted
from opusim.training.networks.base import SharedRows
from opusim.training.zeroth_order import language
from opusim.training.zeroth_order.language import (
    PAD,
    Lora,
    Prefix,
    Prompt,
    TextModel,
    build_language,
    class_tokens,
    encode,
    load_classifier,
    read_texts,
)
from opusim.training.zeroth_order.step_log import replay
from opusim.training.zeroth_order.trainer import ZoTrainer

pytest.importorskip("transformers")
pytest.importorskip("peft")
from tests.support.command import opusim
from tests.support.run_folders import newest
from tests.support.tiny_language import LABELS, TEXTS, make

CAUSAL, MASKED = Prompt(), Prompt(template="{text} It was {mask}")
KINDS = {"gpt2": CAUSAL, "opt": CAUSAL, "bert": MASKED}
TARGETS = {"gpt2": ("c_attn",), "opt": ("q_proj", "v_proj"), "bert": ("query", "value")}
CONFIG = {
    "epochs": 2, "threads": 1, "data": {"n_classes": 2, "validation_fraction": 0.0},
    "sampler": {"scheme": "poisson", "batch_size": 6}, "trainer": {"kind": "zo"},
    "protection": {"kind": "record", "noise_multiplier": 1.0},
}  # fmt: skip


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


def test_a_frozen_output_layer_scores_the_class_words_only(tmp_path: Path, kind: str) -> None:
    """The same scores as from all words of the vocabulary, which a trained output layer computes."""
    folder, prompt = make(tmp_path, kind), KINDS[kind]
    whole, tokenizer = load_classifier(folder, prompt)
    part, _ = load_classifier(folder, prompt, lora=Lora(rank=2, targets=TARGETS[kind]))
    x, rows = encode(tokenizer, TEXTS, prompt), list[int]()
    part.model.get_base_model().get_output_embeddings().register_forward_hook(
        lambda module, args, output: rows.append(output.shape[-1])
    )
    assert torch.allclose(part(x), whole(x), atol=1e-5)
    assert rows == [2]
    assert part.model.get_base_model().get_output_embeddings()(torch.zeros(1, 16)).shape == (1, 18)


@pytest.mark.parametrize("causal", ["gpt2", "opt"])
@pytest.mark.parametrize("prefix", [None, Prefix(tokens=2)])
def test_prompts_that_share_a_row_keep_their_own_scores(
    tmp_path: Path, causal: str, prefix: Prefix | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to roundings, and whatever the others hold; a pass without the mask, the planted fault, is not taken."""
    model, tokenizer = load_classifier(make(tmp_path, causal), CAUSAL, prefix=prefix)
    x = encode(tokenizer, TEXTS, CAUSAL)
    with torch.no_grad():
        alone = model(x)
        model.packs = True
        assert torch.allclose(model(x), alone, atol=1e-6)
        assert model._separates
        assert torch.equal(model(torch.cat([x[:5], x[5:].flip(0)]))[:5], model(x)[:5])
        run = model._run

        def without_mask(**given: torch.Tensor) -> torch.Tensor:
            return run(**given | {"attention_mask": torch.ones_like(given["input_ids"])})

        monkeypatch.setattr(model, "_run", without_mask)
        plain = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(language._OwnAttention, "_attend", plain)
        model._separates = None
        model(x)
        assert not model._separates


def test_a_prompt_has_the_same_bits_in_any_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision; rows in which attention depends on their length, the planted fault, are not taken."""
    model, tokenizer = load_classifier(make(tmp_path, "opt"), CAUSAL, dtype="bfloat16")
    x = encode(tokenizer, [f"{text} {' '.join(['good'] * n)}" for n, text in enumerate(TEXTS)], CAUSAL)
    with torch.no_grad():
        model.packs = model.alike = True
        whole = model(x)
        assert model._separates
        for some in ([3], [1, 0], [5, 3, 4, 1]):
            assert torch.equal(model(x[some]), whole[some])
        model.packs = False  # in rows of their own, which leave out no column
        assert torch.equal(model(x[[0, 1, 2, 3]]), model(x)[:4])
        model.packs, model._separates = True, None
        monkeypatch.setattr(language, "_OwnAttention", LongRowsDiffer)
        model(x)
        assert not model._separates


class LongRowsDiffer(language._OwnAttention):
    """Attends by other weights in longer rows."""

    def _attend(self, query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        return super()._attend(query * (1 + self._rows.ids.shape[1] / 16), *rest, **options)


@pytest.mark.parametrize("causal", ["gpt2", "opt"])
def test_directions_that_share_a_pass_have_prompts_share_rows(
    tmp_path: Path, causal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same steps, up to roundings, as with a row for each prompt; not with another prompt's, the planted fault."""
    found, widths = list[np.ndarray[Any, Any]](), list[int]()
    rank = {"trainer": {"kind": "zo", "rank": 1, "directions": 5, "perturbation": 0.01, "rows_at_once": 24}}
    right = language.PromptClassifier.in_shared_rows

    def wrong(self: language.PromptClassifier, x: torch.Tensor) -> SharedRows:
        shared = right(self, x)
        assert shared is not None
        widths.append(len(shared.batch[0]))
        return replace(shared, outputs=lambda scores: shared.outputs(scores).roll(1, dims=0))

    for number, method in enumerate((right, lambda *_: None, wrong)):
        monkeypatch.setattr(language.PromptClassifier, "in_shared_rows", method)
        model, tokenizer = load_classifier(
            make(tmp_path / "model", causal), CAUSAL, lora=Lora(rank=2, targets=TARGETS[causal])
        )
        x, y = encode(tokenizer, TEXTS, CAUSAL), np.array(LABELS)
        run = training.train(CONFIG | rank, data=(x, y), model=model, folder=tmp_path / str(number))
        found.append(np.concatenate([t.numpy().flatten() for t in replay(run.folder.path).tensors.values()]))
    assert np.allclose(found[0], found[1], atol=1e-5)
    assert not np.allclose(found[2], found[1], atol=1e-5)
    assert set(widths) == {1}


def test_half_precision_needs_equal_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that rounds in larger batches in another way is refused; float32 takes it on trust."""
    x, y = np.ones((12, 4), dtype=np.float32), np.array([0, 1] * 6)
    right = ZoTrainer._outputs
    monkeypatch.setattr(ZoTrainer, "_outputs", lambda self, x: right(self, x) * (1 + 2.0**-8 * (len(x) > 5)))
    with pytest.raises(ValueError, match=r"half precision a record's output changes by .* take float32"):
        training.train(CONFIG, data=(x, y), model=Half(4, 2).bfloat16(), folder=tmp_path / "half")
    training.train(CONFIG, data=(x, y), model=Half(4, 2), folder=tmp_path / "whole")


class Half(torch.nn.Linear):
    """Takes records in its own precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


def test_a_prompt_that_overflows_leaves_those_of_its_row_alone(tmp_path: Path) -> None:
    model, tokenizer = load_classifier(make(tmp_path), CAUSAL)
    x = encode(tokenizer, ["good film", "a very dull plot", "bad film"], CAUSAL)
    with torch.no_grad():
        alone = model(x)
        model.packs = True
        model(x)
        dull = tokenizer.convert_tokens_to_ids("dull")
        model.model.transformer.wte.weight[dull] = torch.inf
        found = model(x)
    assert not torch.isfinite(found[1]).any()
    assert torch.isfinite(found[[0, 2]]).all()
    assert found.shape == alone.shape


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


def test_what_a_run_stores_tells_no_texts_length(tmp_path: Path, kind: str) -> None:
    """The width of the records stands in `config.json`; and texts of any length can be classified later."""
    prompt = KINDS[kind]
    model, tokenizer = load_classifier(make(tmp_path / "model", kind), prompt)
    x, y = encode(tokenizer, TEXTS, prompt), np.array(LABELS)
    run = training.train({**CONFIG, "mode": "release"}, data=(x, y), model=model, folder=tmp_path / "run")
    assert run.facts["network"]["n_inputs"] == prompt.max_tokens
    assert run.predict(encode(tokenizer, ["good", "good " * 9], prompt)).shape == (2,)


def test_what_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    causal, bert, no_model = make(tmp_path / "m"), make(tmp_path / "b", "bert"), tmp_path / "no.gguf"
    _, tokenizer = load_classifier(causal, CAUSAL)
    texts = tmp_path / "texts.tsv"
    texts.write_text("good film\t1\nno label\n")
    monkeypatch.setitem(sys.modules, "gguf", None)

    def trained(language: dict[str, Any], data: dict[str, Any] | None = None) -> None:
        settings = {"data": data or {}, "trainer": {"kind": "zo", "language": language}}
        training.train(settings, folder=tmp_path / "run")

    for act, message in (
        (lambda: class_tokens(tokenizer, Prompt(classes=("great", "wonderful"))), "'wonderful' is 1 tokens or unkn"),
        (lambda: class_tokens(tokenizer, Prompt(classes=("great", "very good"))), "'very good' is 2 tokens"),
        (lambda: Prompt(template="It was"), r"must hold \{text\} once"),
        (lambda: load_classifier(tmp_path / "nowhere", CAUSAL, local_only=True), "nowhere: cannot be loaded"),
        (lambda: read_texts(texts), "line 2 is not: text, tab, class number"),
        (lambda: load_classifier(bert, Prompt(template="{text} is")), r"'bert' predicts a masked .* put \{mask\}"),
        (lambda: load_classifier(bert, MASKED, prefix=Prefix()), "prefix_tokens = 5: BertForMaskedLM takes no"),
        (lambda: load_classifier("package:no_such", CAUSAL), "there is no installed package 'no_such'"),
        (lambda: load_classifier("package:json", CAUSAL), "holds 0 files .gguf, and no config.json"),
        (lambda: load_classifier(no_model, CAUSAL), "no.gguf: there is no such file; check the path"),
        (lambda: trained({"model": "m", "lora_rank": 8, "prefix_tokens": 5}), "lora_rank = 8 and prefix_tokens = 5 a"),
        (lambda: trained({"model": str(causal)}), "trainer.language.text: is missing"),
        (
            lambda: trained({"model": str(causal), "text": str(texts)}, {"n_classes": 3}),
            "data.n_classes: 3 differs from the number",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            act()
    no_model.write_bytes(b"no model")
    with pytest.raises(ModuleNotFoundError, match="gguf is missing; the language model .*language"):
        load_classifier(no_model, CAUSAL)


def command(tmp_path: Path, run: str, kind: str, *, lora: bool) -> list[str]:
    """Fine-tune a tiny model for 12 steps; the paths are relative, as a person types them."""
    make(tmp_path / "model", kind)
    lines = [f"{text}\t{label}" for text, label in zip(TEXTS, LABELS, strict=True)]
    (tmp_path / "texts.tsv").write_text("\n".join(lines) + "\n")
    options = f"train zo --language-model model --text texts.tsv --out {run} --epochs 2".split()
    options += ["--lora-rank", "2", "--lora-targets", ",".join(TARGETS[kind])] if lora else []
    options += ["--prompt", KINDS[kind].template] if KINDS[kind].masked else []
    settings = ("threads=1", "sampler.batch_size=5", "data.validation_fraction=0.1", "optimizer.lr=0.1")
    return [*options, "--protect", "record", "--epsilon", "8", *(p for s in settings for p in ("--set", s))]


@pytest.mark.parametrize(("kind", "lora"), [
    pytest.param(kind, lora, marks=() if (kind, lora) == ("gpt2", True) else pytest.mark.slow)
    for kind in KINDS
    for lora in (False, True)
])  # fmt: skip
def test_a_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lora: bool) -> None:
    """Killed and resumed from another folder with only `opusim train resume`: the same to the bit."""
    begun = command(tmp_path, "whole", kind, lora=lora)
    assert opusim(*begun, "--quiet", cwd=tmp_path).returncode == 0
    (tmp_path / "elsewhere").mkdir()
    begun[begun.index("whole")] = "broken"

    def killed(self: Engine) -> None:
        if self.step == 5:
            self.checkpoint()
            raise ConnectionAbortedError
        advance(self)

    advance = Engine._advance
    with monkeypatch.context() as planted:
        planted.setattr(Engine, "_advance", killed)
        assert "ConnectionAbortedError" in opusim(*begun, "--quiet", "--debug", cwd=tmp_path).stderr
    resume = ("train", "resume", tmp_path / "broken", "--quiet")
    assert opusim(*resume, cwd=tmp_path / "elsewhere").returncode == 0
    one, two = newest(tmp_path / "whole"), newest(tmp_path / "broken")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert replay(tmp_path / "broken").arrived
    assert "opusim train zo --config" in (tmp_path / "whole" / "report.html").read_text()
    read = training.load_run(tmp_path / "broken")
    assert read.guarantees[0].epsilon <= 8
    assert read.config.data.n_classes == 2


def test_another_base_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctrl_c_at: type) -> None:
    """LoRA's factors mean nothing on other weights, which no checkpoint holds."""
    monkeypatch.chdir(tmp_path)
    options = {
        "model": str(make(tmp_path / "model", "opt")), "text": str(tmp_path / "texts.tsv"), "lora_rank": 2,
    }  # fmt: skip
    (tmp_path / "texts.tsv").write_text("good\t1\nbad\t0\n" * 20)
    config = {**CONFIG, "data": {}, "trainer": {"kind": "zo", "language": options}}
    with pytest.raises(RunInterrupted):
        training.train(config, folder=tmp_path / "run", watcher=ctrl_c_at(3))
    kept = tmp_path / "model" / "model.safetensors"
    tensors = load_file(kept)
    name = next(name for name in tensors if "q_proj.weight" in name)
    tensors[name][0, 0] += 1
    save_file(tensors, kept, metadata={"format": "pt"})
    with pytest.raises(RunFolderError, match="started with another network"):
        training.train(folder=tmp_path / "run", resume=True)


def test_texts_come_from_tables(tmp_path: Path) -> None:
    """Quoted commas and line ends, class words and numbers, and columns by any name."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"id": [7, 8, 9], "said": ["good, very", "bad\nfilm", "dull"], "mood": ["great", "terrible", "0"]}
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "a.csv.gz", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.csv.gz", "a.parquet"):
        texts, labels = read_texts(tmp_path / name, columns=("said", "mood"), classes=("terrible", "great"))
        assert (texts, labels.tolist()) == (["good, very", "bad\nfilm", "dull"], [1, 0, 0])
        texts, labels = read_texts(tmp_path / name, columns=("said", ""), labelled=False)
        assert (texts[2], labels.tolist()) == ("dull", [0, 0, 0])
    for columns, message in (
        (("text", "mood"), "has 0 columns 'text' among id, said, mood; name the one of texts"),
        (("said", "said"), "label 1 is 'good, very', no class number from 0, nor one of terrible, great"),
    ):
        with pytest.raises(DataError, match=message):
            read_texts(tmp_path / "a.csv", columns=columns, classes=("terrible", "great"))
    (tmp_path / "b.csv").write_text("text,label\ngood,1\nNA,0\n")
    with pytest.raises(DataError, match="row 2 has no 'text'.*such as NA"):
        read_texts(tmp_path / "b.csv")


def test_a_model_comes_from_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "tiny_model_package")
    (tmp_path / "tiny_model_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    one, tokenizer = load_classifier("package:tiny_model_package", CAUSAL, local_only=True)
    two, _ = load_classifier(tmp_path / "tiny_model_package", CAUSAL, local_only=True)
    x = encode(tokenizer, TEXTS, CAUSAL)
    assert torch.equal(one(x), two(x))
    name = "language model package:tiny_model_package"
    assert one.notes == (f"{name}: 7,904 parameters in float32 take 31 KiB of memory; 7,904 are trained",)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    for content in (b"no model", b"GGUF" + bytes(60)):
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(ValueError, match="language model .*a.gguf: cannot be loaded"):
            load_classifier(tmp_path / "a.gguf", CAUSAL)


@pytest.mark.parametrize(("mode", "told"), [
    ("experiment", "2 of 5 did, and 2 shorter ones are padded"), ("release", "their number is not reported"),
])  # fmt: skip
def test_a_run_says_how_many_texts_are_cut_in_an_experiment(tmp_path: Path, mode: str, told: str) -> None:
    """Texts of 8 tokens and more lose their end beside the prompt's 2 at 9 tokens in all; shorter ones are padded."""
    (tmp_path / "texts.tsv").write_text("".join(f"{'good ' * n}\t1\n" for n in (3, 6, 7, 8, 20)))
    options = {"model": str(make(tmp_path / "m")), "text": str(tmp_path / "texts.tsv"), "max_tokens": 9}
    config = load_config({"mode": mode, "trainer": {"kind": "zo", "language": options}})
    _, _, model = build_language(config)
    assert told in model.notes[1]
    assert "5" not in model.notes[1] or mode == "experiment"


def test_the_loss_of_a_text_is_of_its_next_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers on each text without padding; in parts of the batch, too."""
    model, tokenizer = load_classifier(make(tmp_path), None, local_only=True)
    assert isinstance(model, TextModel)
    x = encode(tokenizer, TEXTS, Prompt(template="{text}", max_tokens=9))
    wanted = []
    for row in x[:6]:
        ids = row[row != PAD].long()[None]
        found = model.model(input_ids=ids, labels=ids).loss
        wanted.append(float(found.detach()) if ids.shape[1] > 1 else 0.0)
    assert max(wanted) > 2.0
    zeros = torch.zeros(6, dtype=torch.long)
    for most in (2**26, 18 * 9 * 4):
        monkeypatch.setattr("opusim.training.zeroth_order.language._LOGITS_AT_ONCE", most)
        found = torch.nn.functional.cross_entropy(model(x[:6]), zeros, reduction="none")
        assert found.tolist() == pytest.approx(wanted, abs=5e-6)


@pytest.mark.parametrize("prefix", [pytest.param(None, marks=pytest.mark.slow), Prefix(tokens=3)])
def test_a_run_models_texts(tmp_path: Path, prefix: Prefix | None) -> None:
    model, tokenizer = load_classifier(make(tmp_path / "model"), None, prefix=prefix)
    x = encode(tokenizer, TEXTS, Prompt(template="{text}", max_tokens=9))
    config = {
        **CONFIG, "optimizer": {"lr": 0.05}, "trainer": {"kind": "zo", "directions": 8, "clip": "joint"},
    }  # fmt: skip
    told: list[str] = []
    watcher = Callback()
    watcher.on_note = told.append  # type: ignore[method-assign]
    data = x, np.zeros(len(x), dtype=int)
    run = training.train(config, data=data, model=model, folder=tmp_path / "run", watcher=watcher)
    assert told == list(model.notes)
    again = training.load_run(run.folder.path)
    assert (again.predict(x) == run.predict(x)).all()
    assert prefix is None or list(replay(run.folder.path).tensors) == ["model.prefix"]


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_prefix_begins_as_tokens_before_the_text(tmp_path: Path, kind: str) -> None:
    """The scores are those of the plain model with its tokens in front, however far a batch pads the text."""
    folder = make(tmp_path, kind)
    model, tokenizer = load_classifier(folder, CAUSAL, prefix=Prefix(tokens=4, seed=5))
    x = encode(tokenizer, TEXTS, CAUSAL)[:6]
    tokens = torch.randint(18, (1, 4), generator=torch.Generator().manual_seed(5))
    plain, _ = load_classifier(folder, CAUSAL)
    for number, row in enumerate(x):
        front = torch.cat([tokens[0].float(), row[row != PAD]])[None]
        assert torch.allclose(model(x)[number], plain(front)[0], atol=1e-5)
        assert torch.allclose(model(x[number : number + 1])[0], plain(front)[0], atol=1e-5)
        assert not torch.allclose(plain(front)[0], plain(x[number : number + 1])[0], atol=1e-3)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["model.prefix"]
