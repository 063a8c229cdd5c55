"""Which runs say that their sums are exactly rounded, and that they are."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opusim import training
from opusim.randomness.rounded import grid_of
from opusim.randomness.streams import SeededStream, SystemStream
from opusim.training.config.run import load_config
from opusim.training.data.samplers import most_records
from opusim.training.engine.plan import RunPlan, load_data
from opusim.training.networks.clipping import CountedSums
from opusim.training.protections.base import rounds_exactly

RECORD = {"kind": "record", "noise_multiplier": 0.8}


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).normal(size=(64, 5)), np.arange(64) % 3


def config(kind: str, protection: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "epochs": 1, "threads": 1, "data": {"n_classes": 3, "validation_fraction": 0.0}, "trainer": {"kind": kind},
        "sampler": {"scheme": "poisson", "batch_size": 16}, "protection": protection, **sections,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        (config("bp", RECORD), True),
        (config("ulr", RECORD), True),
        (config("convex", {**RECORD, "relation": "zero_out"}), True),
        (config("bp", {**RECORD, "relation": "replace_one"}), True),
        (config("bp", {"kind": "label-amplified", "noise_multiplier": 0.8}), True),
        (config("bp", {**RECORD, "bands": 2}, sampler={"batch_size": 16}), False),
        (config("pdfa", {**RECORD, "noise": "device"}), False),
        (config("pdfa", {"kind": "label-amplified", "noise_multiplier": 0.8, "noise": "device"}), False),
    ],
)
def test_a_step_says_whether_its_sums_are_exactly_rounded(settings: dict[str, Any], exact: bool) -> None:
    resolved = load_config(settings).replaced(data={"name": "arrays"})
    (mechanism,) = RunPlan.resolve(resolved, load_data(resolved, data())).mechanisms
    assert mechanism.exactly_rounded is exact


@pytest.mark.parametrize(
    ("place", "noise", "exact"),
    [("cpu", "digital", True), ("cuda", "digital", False), ("cuda:1", "digital", False), ("cpu", "device", False)],
)  # fmt: skip
def test_only_the_processor_rounds_exactly(place: str, noise: str, exact: bool) -> None:
    config: Any = SimpleNamespace(torch_device=place, protection=SimpleNamespace(noise=noise))
    assert rounds_exactly(config) is exact


@pytest.mark.parametrize(
    ("kind", "protection"),
    [
        ("bp", RECORD),
        ("ulr", RECORD),
        ("convex", RECORD),
        ("convex", {"kind": "last-iterate", "noise_multiplier": 0.8}),
        ("bp", {"kind": "label-amplified", "noise_multiplier": 0.8}),
    ],
)
def test_every_noisy_sum_of_a_run_is_a_multiple_of_its_grid(
    kind: str, protection: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step adds noise past `add_rounded`, whose results are what the optimizer gets."""
    drawn: list[bool] = []
    add_rounded = SeededStream.add_rounded

    def seen(self: SeededStream, y: torch.Tensor, std: float) -> torch.Tensor:
        found = add_rounded(self, y, std)
        drawn.append(bool((found.double() / grid_of(std) % 1 == 0).all()))
        return found

    monkeypatch.setattr(SeededStream, "add_rounded", seen)
    added: list[int] = []
    add_to = SeededStream.add_to
    monkeypatch.setattr(
        SeededStream, "add_to", lambda self, y, std: added.append(y.numel()) or add_to(self, y, std)
    )
    sampler = (
        {"batch_size": 16}
        if protection["kind"] == "last-iterate"
        else {"scheme": "poisson", "batch_size": 16}
    )
    training.train(config(kind, protection, sampler=sampler), data=data(), folder=tmp_path / "run")
    assert len(drawn) >= 4
    assert all(drawn)
    if kind != "ulr":  # whose estimates have noise of their own
        assert added == []


@pytest.mark.filterwarnings("ignore:after 4 steps")  # without noise the sum of a bias may stay as it was
@pytest.mark.parametrize("mode", ["release", "experiment"])
@pytest.mark.parametrize(
    ("kind", "protection", "counts"),
    [
        ("bp", RECORD, True),
        ("bp", {**RECORD, "relation": "replace_one"}, True),
        ("ulr", RECORD, True),
        ("convex", RECORD, True),
        ("bp", {"kind": "label-amplified", "noise_multiplier": 0.8}, True),
        ("bp", {**RECORD, "bands": 2}, False),
    ],
)
def test_the_noise_of_a_release_counts_the_rounding_of_its_sum(
    kind: str, protection: dict[str, Any], counts: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the bound of the largest batch that public numbers allow; an experiment's numbers are as they were."""
    drawn: list[float] = []
    for stream in (SystemStream, SeededStream):
        monkeypatch.setattr(stream, "add_rounded", lambda self, y, std: drawn.append(std) or y)
    sampler = {"batch_size": 16} if "bands" in protection else {"scheme": "poisson", "batch_size": 16}
    settings = config(kind, protection, sampler=sampler, mode=mode)
    run = training.train(settings, data=data(), folder=tmp_path / "run")
    (mechanism,) = {replace(one, steps=1) for one in run.folder.read_ledger().mechanisms}
    assert mechanism.counts_sums is (counts and mode == "release")
    block = {"block": 0} if protection["kind"] == "label-amplified" else {}
    records = most_records(16.0, records=64, processes=1)
    error = replace(CountedSums.of(records, processes=1), **block).error
    assert error > 1e-5
    clip = run.config.protection.clip if kind != "convex" else mechanism.clip_norm
    wanted = 0.8 * clip * (1 + error * mechanism.counts_sums)
    assert drawn == pytest.approx([wanted] * len(drawn), rel=1e-12)
    assert drawn or not counts
