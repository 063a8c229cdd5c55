"""Random copies of images: what they are, that a record's gradient is their mean before the clip, and refusals."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.bare import feedback_trainer
from opusim import training
from opusim.description.section import merged
from opusim.errors import ConfigError
from opusim.randomness.streams import SeededStream
from opusim.training.data.public_maps import Augmentation
from opusim.training.feedback.trainer import ModuleGradients
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.functions import Objective
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.protections.record import RecordGradients
from tests.support.run_folders import require_resumed_alike

CLIP = 0.05


def images(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 3


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3))


class Fixed(Augmentation):
    """Gives the images of a list in turn, in place of random copies."""

    def copy_of(self, images: Tensor) -> Tensor:
        number = next(self.numbers)  # type: ignore[attr-defined]
        return images.roll(number, dims=-1)


def fixed(*moves: int) -> Fixed:
    one = Fixed(copies=len(moves), mirror=False, shift=0)
    object.__setattr__(one, "numbers", iter(moves))
    return one


def update(augmentation: Augmentation, *, clip: float) -> Tensor:
    """The protected gradient of one step, all parameters."""
    net, (x, y) = conv_net(), images()
    stream = SeededStream(1, "test")
    writer = RecordGradients(clip_norm=clip, noise_multiplier=0.0, divisor=4.0, noise=stream)
    network = AnyModule(net, n_inputs=64, record_shape=(1, 8, 8), recipe={})
    objective, tape = Objective.named("cross-entropy", "class"), RecordTape(net, x[:2])
    source = ModuleGradients(network, objective, seed=3, augmentation=augmentation, tape=tape)
    trainer = feedback_trainer(source, torch.optim.SGD(net.parameters(), lr=0.0), protection=writer)
    trainer.step(x.flatten(1), y, step=0, observe=False)
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("clip", [CLIP, 10.0])  # every record, and none
def test_copies_are_averaged_before_the_clip(clip: float) -> None:
    """Against a loop over records: the gradients of the copies, their mean, its clip, the sum."""
    moves, net, (x, y) = (0, 3, -2), conv_net(), images()
    total = torch.zeros(sum(p.numel() for p in net.parameters()))
    clipped_each = torch.zeros_like(total)
    for record, target in zip(x, y, strict=True):
        own = []
        for move in moves:
            loss = nn.functional.cross_entropy(net(record[None].roll(move, dims=-1)), target[None])
            own.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
        mean = torch.stack(own).mean(dim=0)
        total += mean * min(1.0, clip / float(mean.norm())) / 4.0
        clipped_each += sum(g * min(1.0, clip / float(g.norm())) for g in own) / 4.0
    found = update(fixed(*moves), clip=clip)
    torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-7)
    assert float(found.norm()) <= len(x) * clip / 4.0 * (1 + 1e-6)
    planted = float(clipped_each.norm())  # a clip of each copy lets a record add up to three times C
    assert planted > 1.5 * float(found.norm())


def test_copies_of_one_image_do_not_depend_on_the_others() -> None:
    augmentation = Augmentation(copies=1, mirror=True, shift=2)
    x, _ = images(40)
    changed = x.clone()
    changed[7:] = 9.0
    found = []
    for batch in (x, changed):
        torch.manual_seed(5)
        found.append(augmentation.copy_of(batch))
    assert torch.equal(found[0][:7], found[1][:7])


def test_copies_are_uniform_shifts_and_mirror_images() -> None:
    side, n, shift = 8, 20_000, 2
    image = torch.arange(side * side, dtype=torch.float32).view(1, 1, side, side)
    torch.manual_seed(11)
    copies = Augmentation(copies=1, mirror=True, shift=shift).copy_of(image.expand(n, 1, side, side))
    counts = Counter(copy.tobytes() for copy in copies.numpy())
    assert len(counts) == 2 * (2 * shift + 1) ** 2
    p = 1 / len(counts)
    assert max(abs(count - n * p) for count in counts.values()) < 5 * math.sqrt(n * p * (1 - p))
    padded = np.pad(image[0, 0].numpy(), shift, mode="reflect")
    windows = {
        np.ascontiguousarray(window[:, ::turn][None]).tobytes()
        for i in range(2 * shift + 1)
        for j in range(2 * shift + 1)
        for window in [padded[i : i + side, j : j + side]]
        for turn in (1, -1)
    }
    assert set(counts) == windows


CONFIG: dict[str, Any] = {
    "epochs": 2, "threads": 1, "data": {"n_classes": 3, "mean": 0.5, "std": 0.3},
    "trainer": {"kind": "bp", "augmented_copies": 2, "augment_shift": 1}, "sampler": {"batch_size": 16},
    "protection": {"kind": "record", "epsilon": 8.0}, "model": {"name": "own"},
}  # fmt: skip
ARRAYS = np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32), np.arange(60) % 3


def own(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in merged(CONFIG, changes).items() if key != "model"}


def test_a_protected_run_resumes_to_the_same_bits(tmp_path: Path, stop_at: type) -> None:
    whole, _ = require_resumed_alike(tmp_path, own(), ARRAYS, stop_at(4), conv_net)
    without = {**own(), "trainer": {"kind": "bp"}}
    plain = training.train(without, data=ARRAYS, model=conv_net(), folder=tmp_path / "0")
    assert plain.guarantees[0].epsilon == whole.guarantees[0].epsilon  # copies cost nothing


@pytest.mark.parametrize(("changes", "model", "message"), [
    ({}, None, "is for modules"),
    ({"trainer": {"augment_shift": 8}}, conv_net, "must be below the side of an image, here 8"),
    ({"trainer": {"augmented_copies": 0}}, conv_net, "augment_shift.*does nothing here"),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        training.train(own(**changes), data=ARRAYS, model=model and model(), folder=tmp_path / "run")
