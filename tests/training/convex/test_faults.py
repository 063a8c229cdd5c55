"""A device that fails while it draws a step's noise: the weights are unchanged, and the run resumes bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.bare import bare
from benchmarks.devices.faults import AT_STEP, description_file, weights
from opusim import training
from opusim.devices.kinds import register_device
from opusim.devices.registry import open_device
from opusim.errors import DeviceError, DeviceUnavailable
from opusim.testing.faults import KIND, Fault, FaultyDevice, faulty_device
from opusim.training.config import load_config
from opusim.training.convex.trainer import ConvexTrainer, GatedNetwork, GatedRelu, Objective
from opusim.training.protections.base import DeviceNormals
from opusim.training.protections.record import LastIterateProtection
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint

D, P, K, B = 5, 6, 3, 8
LAST_STEP = AT_STEP + 13


@pytest.fixture(autouse=True)
def _breakable() -> Iterator[None]:
    register_device(KIND, faulty_device)
    FaultyDevice.repaired = False
    yield
    FaultyDevice.repaired = False


def run(folder: Path, device: Path) -> Any:
    """36 steps whose noise the device gives; its gates come from a seed, so that noise is all it is asked for."""
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(48, D)), np.arange(48) % K
    if folder.exists():
        return training.train(data=(x, y), folder=folder, resume=True)
    config = {
        "epochs": 6,
        "threads": 1,
        "data": {"n_classes": K, "mean": 0.0, "std": 1.0, "validation_fraction": 0.0},
        "trainer": {"kind": "convex", "hyperplanes": P, "regularisation": 0.05},
        "optimizer": {"lr": 1.5, "momentum": 0.0},
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": B},
        "protection": {"kind": "last-iterate", "epsilon": 3.0, "noise": "device"},
        "device": {"name": str(device), "noise": {"sigma": 0.5}},
        "checkpoint": {"every_steps": AT_STEP, "keep": 100},
    }
    return training.train(config, data=(x, y), folder=folder)


def kept(folder: Path, step: int) -> Tensor:
    """The weights of one checkpoint."""
    (path,) = (p for p in list_checkpoints(folder / "checkpoints") if int(p.stem.split("-")[1]) == step)
    return read_checkpoint(path).tensors["model.weight"]


@pytest.mark.parametrize("fault", [Fault.UNPLUGGED, Fault.WRONG_SHAPE, Fault.NOT_A_NUMBER])
def test_a_run_whose_noise_fails_keeps_the_model_of_the_step_before(tmp_path: Path, fault: Fault) -> None:
    wanted = run(tmp_path / "unbroken", description_file(tmp_path, None))
    with pytest.raises(DeviceError, match=f"Step {AT_STEP} of 36 was not done"):
        run(tmp_path / "broken", description_file(tmp_path, fault))
    assert torch.equal(kept(tmp_path / "broken", AT_STEP), kept(tmp_path / "unbroken", AT_STEP))
    FaultyDevice.repaired = True
    found = run(tmp_path / "broken", tmp_path)
    assert found.step == wanted.step == 36
    assert torch.equal(weights(found)["model.weight"], weights(wanted)["model.weight"])


class DescendsBeforeItDraws(ConvexTrainer):
    """The planted fault: the gradient step comes first, its noise after."""

    def _descend(self, x: Tensor, spread: Tensor, step: int) -> None:
        self.model.weight.data.mul_(0.5)
        super()._descend(x, spread, step)


@pytest.mark.parametrize(("kind", "moved"), [(ConvexTrainer, False), (DescendsBeforeItDraws, True)])
def test_a_step_whose_noise_fails_has_moved_nothing(
    tmp_path: Path, kind: type[ConvexTrainer], moved: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    model = GatedRelu(D, K, torch.randn(P, D, generator=generator))
    config = load_config({"trainer": {"kind": "convex", "regularisation": 0.05}})
    optimizer = torch.optim.SGD([model.weight], lr=1.5)
    x, y = torch.randn(B, D, generator=generator), torch.arange(B) % K
    description = str(description_file(tmp_path, Fault.UNPLUGGED))
    with open_device(description, n_inputs=D, n_outputs=P) as device:
        trainer = bare(
            kind,
            GatedNetwork(model),
            config,
            total_steps=LAST_STEP + 1,
            optimizer=optimizer,
            objective=Objective(name="margin", clip=0.5),
            divisor=B,
            noise=DeviceNormals(device),
            noise_std=1.0,
            final_std=1.0,
            device=device,
        )
        trainer.step(x, y, step=0)
        before = model.weight.detach().clone()
        assert bool(before.count_nonzero())
        with pytest.raises(DeviceUnavailable):
            trainer.step(x, y, step=LAST_STEP)
        assert torch.equal(model.weight, before) is not moved


def test_a_protection_that_gives_no_noise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without its noise would be stated as proven."""
    monkeypatch.setattr(LastIterateProtection, "central_noise", lambda self, device: None)
    with pytest.raises(ValueError, match="noise is missing; noise_std = "):
        run(tmp_path / "run", description_file(tmp_path, Fault.UNPLUGGED))
