"""What a run does for a card, without one: late checks, records on the host, names, memory, exchanges."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opusim import checks, training
from opusim.devices import base
from opusim.errors import ConfigError, DeviceFault
from opusim.processes import ranks
from opusim.training.config.run import load_config
from opusim.training.data.dataset import Dataset, HostSplit, Split
from opusim.training.engine import cards, loop, plan
from opusim.training.engine.algorithm import EpochSums, StepRecord
from opusim.training.errors import CardMemoryError, TrainingDiverged
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.networks import clipping
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.zeroth_order.step_log import LOG_FILE
from opusim.training.zeroth_order.trainer import ZoTrainer
from tests.support.run_folders import equal

CONFIG: dict[str, Any] = {
    "epochs": 3, "threads": 1, "model": {"hidden": [8]}, "sampler": {"batch_size": 16},
    "checkpoint": {"every_steps": 3},
}  # fmt: skip
DIVERGES = {"optimizer": {"lr": 9e3}, "model": {"hidden": [8, 8, 8], "activation": "relu"}}


def data(n: int) -> tuple[np.ndarray, np.ndarray]:
    y = np.arange(n) % 3
    return np.random.default_rng(1).normal(size=(n, 5)) + 2.0 * y[:, None], y


DATA, MANY = data(60), data(320)


def newest(folder: Path) -> tuple[int, dict[str, Tensor]]:
    found = read_checkpoint(list_checkpoints(folder / "checkpoints")[-1])
    return found.step, found.tensors


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check values on the processor as late as those on a card."""
    at_once = checks.require

    def require(value: Tensor, refusal: checks.Refusal) -> None:
        collecting = checks._late.get()
        if collecting is None:
            at_once(value, refusal)
        else:
            collecting.keep(value, refusal)

    monkeypatch.setattr(checks, "require", require)


def diverged(folder: Path, kind: str) -> str:
    config = {**CONFIG, **DIVERGES, "trainer": {"kind": kind}}
    with pytest.raises(TrainingDiverged) as caught:
        training.train(config, data=MANY, folder=folder)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["bp", "pdfa"])
def test_a_divergence_read_late_is_told_alike_and_not_saved(tmp_path: Path, kind: str, request: Any) -> None:
    """With pdfa the encoder refuses the next step's error first, which is not the cause."""
    expected = diverged(tmp_path / "at once", kind)
    request.getfixturevalue("late")
    assert diverged(tmp_path / "late", kind) == expected
    assert expected.startswith("step ")
    for name in ("at once", "late"):
        step, tensors = newest(tmp_path / name)
        assert step <= int(expected.split(":")[0].removeprefix("step "))
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def test_planted_a_checkpoint_without_a_read_saves_it(tmp_path: Path, late: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(checks.LateChecks, "read", lambda self: None)
    config = {**CONFIG, **DIVERGES, "trainer": {"kind": "bp"}, "checkpoint": {"every_steps": 1}}
    with pytest.raises(TrainingDiverged):  # figures of the end
        training.train(config, data=MANY, folder=tmp_path)
    _, tensors = newest(tmp_path)
    assert not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def test_a_reading_refused_late_keeps_the_checkpoint(tmp_path: Path, late: None, monkeypatch: Any) -> None:
    readings = 0

    def check(y: Tensor, shape: tuple[int, ...], name: str) -> None:
        nonlocal readings
        readings += 1
        checks.require(torch.tensor(readings != 5), lambda: DeviceFault(f"device {name!r} returned infinity"))

    monkeypatch.setattr(base, "check_reading", check)
    with pytest.raises(DeviceFault, match="returned infinity. Step 6 .*one before it.*step-0+3 are kept"):
        training.train({**CONFIG, "trainer": {"kind": "pdfa"}}, data=MANY, folder=tmp_path)
    assert newest(tmp_path)[0] == 3


def test_late_checks_are_read_in_their_order_and_stay_failed() -> None:
    found = checks.LateChecks()
    warned: list[int] = []
    found.keep(torch.tensor(1.0), lambda: ValueError("not this"))
    found.keep(torch.tensor(False), lambda: warned.append(1))
    found.read()
    assert warned == [1]
    found.keep(torch.tensor(torch.nan, dtype=torch.float64), lambda: ValueError("first"))
    found.keep(torch.tensor(False), lambda: ValueError("second"))
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            found.read()
    with pytest.raises(ValueError, match="now"):  # nothing collects
        checks.require(torch.tensor(torch.inf), lambda: ValueError("now"))


def on_host(dataset: Dataset, name: str) -> Dataset:
    def kept(split: Split) -> HostSplit:
        return HostSplit(split.x, split.y, torch_device=name)

    return replace(dataset, train=kept(dataset.train), validation=kept(dataset.validation))


@pytest.mark.parametrize("kind", ["bp", pytest.param("zo", marks=pytest.mark.slow)])
def test_records_on_the_host_change_no_run(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    config = {**CONFIG, "trainer": {"kind": kind}}
    expected = training.train(config, data=DATA, folder=tmp_path / "resident")
    monkeypatch.setattr(loop, "to_device", on_host)
    found = training.train(config, data=DATA, folder=tmp_path / "host")
    assert found.summary == expected.summary
    assert equal(newest(tmp_path / "host")[1], newest(tmp_path / "resident")[1])


def test_records_move_if_they_take_at_most_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(CONFIG, ())
    dataset = plan.load_data(plan.with_own_inputs(config, DATA), DATA)
    parts = (dataset.train, dataset.validation)
    size = sum(tensor.nbytes for part in parts for tensor in (part.x, part.y))
    for free, kind in ((2 * size, Split), (2 * size - 1, HostSplit), (None, Split)):
        monkeypatch.setattr(cards, "_free_memory", lambda place, free=free: free)
        found = cards.to_device(dataset, "meta").train
        assert type(found) is kind
        x, y = found.batch(torch.arange(3))
        assert found.place.type == x.device.type == y.device.type == "meta"
        assert (x.shape, y.shape) == ((3, 5), (3,))
    monkeypatch.setattr(cards, "_free_memory", lambda place: 0)
    assert type(cards.to_device(dataset, "meta", resident=True).train) is Split
    assert cards.to_device(dataset, "cpu") is dataset


def fail_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = ClosedForm.learn

    def failing(self: ClosedForm, batch: Any) -> Any:
        if batch.step == step:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return learn(self, batch)

    monkeypatch.setattr(ClosedForm, "learn", failing)


def test_a_step_without_memory_names_a_smaller_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG, "trainer": {"kind": "bp"}}
    expected = training.train(config, data=DATA, folder=tmp_path / "whole")
    with monkeypatch.context() as failing:
        fail_at(5, failing)
        told = r"^step 5: a batch of 14 records .* memory of cpu; set sampler.batch_size=7 \(half.* checkpoint is kept$"
        with pytest.raises(CardMemoryError, match=told):
            training.train(config, data=DATA, folder=tmp_path / "run")
    assert newest(tmp_path / "run")[0] == 4
    assert training.train(data=DATA, folder=tmp_path / "run", resume=True).summary == expected.summary


def test_a_release_run_without_memory_tells_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG | {
        "mode": "release", "data": {"n_classes": 3}, "trainer": {"kind": "bp"},
        "sampler": {"scheme": "poisson", "batch_size": 16}, "protection": {"kind": "record", "noise_multiplier": 1.0},
    }  # fmt: skip
    fail_at(1, monkeypatch)
    with pytest.raises(CardMemoryError, match=r"a batch of 16 records .*sampler.batch_size=8 \(half of it\)"):
        training.train(config, data=DATA, folder=tmp_path)


@pytest.mark.parametrize(("peak", "batch"), [(60, 128), (110, 64), (170, 32), (10**6, 1)])
def test_the_batch_that_fits_follows_from_the_allocators_peak(peak: int, batch: int) -> None:
    """Of 50 bytes, 10 are taken: 256 records take peak - 10, and of the other 40 nine tenths count."""
    found = cards.StepMemory(total=50, before=10, peak=peak)
    assert found.fitting(256) == batch
    assert (peak - 10) * batch / 256 <= 36 or batch == 1
    text = str(cards.exhausted(3, 256, torch.device("cuda:0"), found))
    assert f"set sampler.batch_size={batch} (estimated from the allocator's peak, " in text
    assert "\n" not in text


def test_auto_takes_a_card_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        run = training.train({**CONFIG, "torch_device": "auto"}, data=DATA, folder=tmp_path)
        assert run.config.torch_device == "cpu"
        assert json.loads((tmp_path / "config.json").read_text())["config"]["torch_device"] == "cpu"
        told = "trains on the processor, since torch finds no card, as torch_device = 'auto' chose"
        assert cards.place_text("auto") == told
        assert cards.place_text("cpu") is None
    facts = SimpleNamespace(name="A card", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: facts)
    assert cards.named_here("auto") == "cuda"
    text = cards.place_text("auto")
    assert text.startswith("trains on cuda (A card, 80")
    assert text.endswith("as torch_device = 'auto' chose")
    with pytest.raises(ConfigError, match="'cuda:1' is not available here"):
        cards.named_here("cuda:1")


@pytest.mark.parametrize(
    ("cards_here", "processes", "backend"),
    [(0, 1, "gloo"), (1, 2, "gloo"), (2, 2, "cpu:gloo,cuda:nccl"), (4, 2, "cpu:gloo,cuda:nccl")],
)
def test_the_backend_follows_cards(monkeypatch: Any, cards_here: int, processes: int, backend: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards_here > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards_here)
    monkeypatch.setattr(ranks.dist, "is_nccl_available", lambda: True)
    assert ranks.launch_backend() == backend


def test_exchanges_follow_the_default_process_group() -> None:
    """A real group of one process, which has gloo only."""
    dist = ranks.dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert ranks.exchange_backend() == "gloo"
        assert ranks._place_of(torch.empty(2, device="meta")).type == "cpu"
    finally:
        dist.destroy_process_group()


def test_scalars_read_late_give_the_same_run_and_log(tmp_path: Path, monkeypatch: Any, stop_at: type) -> None:
    config = {**CONFIG, "trainer": {"kind": "zo", "directions": 2}}
    expected = training.train(config, data=DATA, folder=tmp_path / "at once")
    monkeypatch.setattr(ZoTrainer, "_reads_late", lambda self, found: True)
    with pytest.raises(KeyboardInterrupt):  # the steps behind the last checkpoint were not logged
        training.train(config, data=DATA, folder=tmp_path / "late", watcher=stop_at(5))
    found = training.train(data=DATA, folder=tmp_path / "late", resume=True)
    assert found.summary == expected.summary
    assert (tmp_path / "late" / LOG_FILE).read_bytes() == (tmp_path / "at once" / LOG_FILE).read_bytes()
    assert equal(newest(tmp_path / "late")[1], newest(tmp_path / "at once")[1])


def test_sums_without_float64_are_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of n^2 2^-48; the float32 sum of these is off by more than a thousand times that."""
    generator = np.random.default_rng(5)
    losses = torch.from_numpy(generator.lognormal(0.0, 3.0, 2000).astype(np.float32))
    monkeypatch.setattr(clipping, "WITHOUT_FLOAT64", {"cpu"})
    sums = EpochSums(torch.device("cpu"))
    single = torch.zeros(())
    for loss in losses:
        sums.add(StepRecord(loss_sum=loss, n_correct=torch.tensor(0), n_records=1))
        single += loss
    exact = float(losses.double().sum())
    bound = len(losses) ** 2 * 2.0**-48 * exact
    assert abs(sums.means()["loss"] * len(losses) - exact) < bound
    assert abs(float(single) - exact) > bound
    again = EpochSums(torch.device("cpu"))
    again.load(sums.dump())
    assert again.means() == sums.means()
