"""The tables of known models at a small size: runs resume bit for bit, and fill their page."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.known_models import gpt, images, nanogpt, private, training
from benchmarks.pages import folder_page
from tests.support.shared_checks import with_marks

TINY = dataclasses.replace(gpt.SMALL, layers=2, heads=2, width=16, context=8, batch=3, steps=16)
ROWS = {
    nanogpt.BP: training.Row(feedback=None, seeds=2),
    nanogpt.TOP: training.Row(feedback={"gain": 0.0}),
    nanogpt.PDFA: training.Row(device="gaussian"),
    "read-out": training.Row(device="gaussian", readout=10, outputs=2),
    "mixed": training.Row(backpropagated=4),
}


@pytest.fixture
def task(results: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nanogpt.Characters]:
    folder = results.parent / "tinyshakespeare"
    folder.mkdir()
    (folder / "input.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    monkeypatch.setattr(training, "CACHE", results / "cache")
    monkeypatch.setattr(nanogpt, "ROWS", ROWS)
    nanogpt.texts.cache_clear()
    yield nanogpt.Characters(TINY, nanogpt.NAME, torch.device("cpu"))
    nanogpt.texts.cache_clear()


@pytest.mark.parametrize("name", with_marks(ROWS, [name for name in ROWS if name != "read-out"]))
def test_a_run_that_is_cut_resumes(
    task: nanogpt.Characters, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = training.Training(task, ROWS[name], 0, tmp_path / "whole.pt")
    found = whole.finish()
    assert (found.step, len(found.curve)) == (16, 8)
    cut = training.Training(task, ROWS[name], 0, tmp_path / "cut.pt")
    saved = cut._save

    def save_and_stop() -> None:
        saved()
        if cut.progress.step == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(cut, "_save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        cut.finish()
    again = training.Training(task, ROWS[name], 0, tmp_path / "cut.pt")
    resumed = again.finish()
    assert (resumed.curve, resumed.frames, resumed.depth) == (found.curve, found.frames, found.depth)
    for own, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.slow
def test_the_page_has_a_line_for_a_row(task: nanogpt.Characters, capsys: pytest.CaptureFixture[str]) -> None:
    training.train_rows(task, ROWS, names=list(ROWS), processes=1)
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert len(list(training.CACHE.rglob("*.pt"))) == 6  # also those of other processes
    training.train_rows(task, ROWS, names=list(ROWS), processes=1)
    assert capsys.readouterr().out == ""
    text = folder_page("known_models")
    assert all(f"| {name} |" in text for name in ROWS)


def test_the_model_is_the_published_one() -> None:
    """nanoGPT reports 10.65 million parameters for the full setting without positions, 0.80 for the small one."""
    counts = {
        setting: sum(p.numel() for p in gpt.GPT(setting, 65).parameters()) - setting.context * setting.width
        for setting in (gpt.FULL, gpt.SMALL)
    }
    assert counts[gpt.FULL] == pytest.approx(10.65e6, rel=1e-3)
    assert counts[gpt.SMALL] == pytest.approx(0.80e6, rel=1e-2)
    assert gpt.rate(0, 2000) < gpt.rate(99, 2000) < gpt.rate(100, 2000) == gpt.RATE
    assert gpt.rate(2000, 2000) == pytest.approx(gpt.RATE / 10)


def test_the_models_of_images_are_the_published_ones() -> None:
    """He et al. 2016 report 0.27 million parameters for ResNet-20."""
    count = {name: sum(p.numel() for p in kind.build().parameters()) for name, kind in images.KINDS.items()}
    assert count["resnet"] == pytest.approx(0.27e6, rel=0.02)
    width, layers = images.VIT.width, images.VIT.layers
    assert count["vit"] == pytest.approx(12 * layers * width**2, rel=0.05)  # of attention, and of the MLP


def test_batches_of_images_are_moved_and_mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    side, n = 32, images.BATCH
    x = torch.arange(side * side, dtype=torch.float32).view(1, 1, side, side).expand(n, 3, side, side) + 1
    monkeypatch.setattr(images, "pictures", lambda: (x, torch.arange(n) % 10, x, torch.arange(n) % 10))
    monkeypatch.setattr(images, "EPOCH", 1)
    task = images.task_of("vit")
    found, y = task.batch(seed=1, step=5)
    again, _ = task.batch(seed=1, step=5)
    assert torch.equal(found, again)
    assert sorted(y.tolist()) == sorted((torch.arange(n) % 10).tolist())
    steps = found[:, :, 15, 16] - found[:, :, 15, 15]  # 1 along a row, -1 where it is mirrored
    mirrored = (steps[:, 0] == -1).double().mean()
    assert set(steps.unique().tolist()) == {-1.0, 1.0}
    assert abs(mirrored - 0.5) < 5 * 0.5 / n**0.5
    rows = (found[:, 0, 15, 15] - 1) // side - 15  # how far each image was moved up
    assert set(rows.tolist()) == set(range(-4, 5))


@pytest.mark.slow
def test_a_private_gpt_states_its_epsilon(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = results.parent / "tinyshakespeare"
    folder.mkdir()
    (folder / "input.txt").write_text("To be, or not to be: that is the question.\n" * 200)
    small = {"FOLDER": results, "EPOCHS": 1, "BATCH": 32, "EPSILONS": (None, 3.0), "SETTING": TINY}
    for name, value in small.items():
        monkeypatch.setattr(private, name, value)
    private.main(seeds="0")
    text = folder_page("known_models")
    assert text.count("| 3.00 | proven | 1 |") == 2
    assert text.count("| - | - | 1 |") == 2
