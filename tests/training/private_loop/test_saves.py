"""What a private loop saves: damage is noticed, and a value that cannot be read back replaces no good save."""

import datetime
import random
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim.training.errors import RunFolderError
from opusim.training.private_loop.folder import CHECKPOINT_FILE, SETTINGS_FILE, read_save, write_save
from tests.support.private_loops import Parts, parts, private_loop, run_epoch

FLIPS = 120


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[opusim.PrivateTraining]:
    """A private loop after two steps, saved."""
    given = parts()
    given[1].param_groups[0]["lr"] = np.float64(0.5)  # as a schedule of numpy sets it
    with private_loop(tmp_path, given) as private:
        run_epoch(private, steps=2)
        private.save("good")
        yield private


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def flipped(content: bytes, flips: int) -> Iterator[bytes]:
    """The content with one bit flipped, each time another."""
    generator = random.Random(3)
    for _ in range(flips):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        yield bytes(changed)


def test_no_flipped_bit_leads_to_another_model(loop: opusim.PrivateTraining) -> None:
    file = loop.folder / CHECKPOINT_FILE
    sound, (state, position) = file.read_bytes(), read_save(loop.folder)
    assert equal(state["optimizer"]["param_groups"][0]["lr"], np.float64(0.5))
    noticed = 0
    for content in flipped(sound, FLIPS):
        file.write_bytes(content)
        try:
            found = read_save(loop.folder)
        except RunFolderError:
            noticed += 1
        else:
            assert equal(found, (state, position))  # the bit lies between the parts of the file
    assert noticed > FLIPS / 10


@pytest.mark.filterwarnings("ignore:.*has no digest")  # a flip may hit the name of the seal
def test_settings_that_were_changed_are_refused(loop: opusim.PrivateTraining) -> None:
    file = loop.folder / SETTINGS_FILE
    sound = file.read_bytes()
    found = ["noise_multiplier", "seed"]
    for content in flipped(sound, FLIPS):
        file.write_bytes(content)
        with suppress(RunFolderError):  # one line
            assert loop.settings.require_same(loop.folder, found=found) == loop.settings
    file.write_bytes(sound.replace(b'"noise_multiplier": 1.0', b'"noise_multiplier": 0.5'))
    with pytest.raises(RunFolderError, match=r"private\.json was changed since it was written"):
        loop.settings.require_same(loop.folder, found=found)
    with pytest.raises(RunFolderError, match=r"private\.json is not the file that private\.pt"):
        read_save(loop.folder)


KEPT: dict[str, Any] = {
    "numpy.float64": np.float64(0.5),
    "numpy.float32": np.float32(0.1),
    "numpy.int64": np.int64(3),
    "numpy.bool": np.bool_(True),
    "numpy.complex128": np.complex128(1 + 2j),
    "numpy.datetime64": np.datetime64("2026-11-27"),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "strided array": np.arange(12.0)[::2],
    "array of no rows": np.zeros((0, 3), dtype=np.float32),
    "array of texts": np.array(["a", "bc"]),
    "state of numpy": np.random.default_rng(1).bit_generator.state,
    "state of random": random.Random(1).getstate(),
    "state of torch": torch.get_rng_state(),
    "nested": {"a": [1, (np.float64(2.0), {"b": np.arange(3)})], "c": OrderedDict(d=np.int8(1))},
    "others": {"f": 0.1, "b": True, "t": "x", "n": None, "bytes": b"ab", "c": 1j, "count": Counter("aa")},
    "dtype": torch.float16,
}
REFUSED: dict[str, Any] = {
    "path": Path("x"),
    "time": datetime.datetime(2026, 11, 27),
    "class": dict,
    "function": parts,
    "lambda": lambda: None,
    "masked array": np.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "objects": np.array([{"a": 1}], dtype=object),
    "records": np.zeros(2, dtype=[("a", "f4")]),
}


def test_values_of_numpy_come_back_as_they_were(loop: opusim.PrivateTraining) -> None:
    loop.save(KEPT)
    found = read_save(loop.folder)[0]["extra"]
    assert [name for name in KEPT if not equal(found[name], KEPT[name])] == []


def test_what_cannot_be_read_back_replaces_no_save(loop: opusim.PrivateTraining) -> None:
    before = (loop.folder / CHECKPOINT_FILE).read_bytes()
    for value in REFUSED.values():
        with pytest.raises(TypeError, match=r"^save: extra\['list'\]\[1\] = .* cannot be read back"):
            loop.save({"step": 3, "list": [1.0, value]})
        assert (loop.folder / CHECKPOINT_FILE).read_bytes() == before
    assert read_save(loop.folder)[0]["extra"] == "good"


def test_a_list_that_holds_itself_is_refused(loop: opusim.PrivateTraining) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="cannot be read back"):
        loop.save(endless)


def test_a_save_of_an_earlier_version_resumes_with_a_warning(tmp_path: Path) -> None:
    with private_loop(tmp_path) as private:
        run_epoch(private, steps=2)
        private.save("note")
    state, position = read_save(tmp_path)
    old = {"version": 1, **state, "ledger": position.to_json(), "inode": None}
    torch.save(old, tmp_path / CHECKPOINT_FILE)
    with (
        pytest.warns(UserWarning, match=r"private\.pt: has no digest, like all files of versions before"),
        private_loop(tmp_path, resume=True) as resumed,
    ):
        assert (resumed.step, resumed.extra) == (2, "note")
    write_save(tmp_path, state, ledger=position, bound=False)
    assert equal(read_save(tmp_path), (state, position))
    del state["optimizer_class"]  # which versions did not save either
    write_save(tmp_path, state, ledger=position, bound=False)
    private_loop(tmp_path, resume=True).close()


MODES = pytest.mark.parametrize(
    "options", [{"mode": "experiment", "seed": 3}, {"mode": "release", "seed": None}], ids=lambda one: one["mode"]
)  # fmt: skip


def with_optimizer(kind: Any, *, width: int = 6) -> Parts:
    module, _, criterion, loader = parts(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 3)))
    return module, kind(module.parameters(), lr=0.5), criterion, loader


@MODES
def test_other_parts_are_refused_before_anything_is_paid(tmp_path: Path, options: dict[str, Any]) -> None:
    sgd = torch.optim.SGD
    with private_loop(tmp_path, with_optimizer(sgd), **options) as private:
        run_epoch(private)
        private.save()
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    for other, message in (
        (with_optimizer(torch.optim.Adam), "optimizer = Adam: the save in .* has SGD; resume"),
        (with_optimizer(sgd, width=7), r"the shape of '0\.weight' = \(7, 8\): the save in .* has \(6, 8\);"),
    ):
        with pytest.raises(RunFolderError, match=message) as caught:
            private_loop(tmp_path, other, resume=True, **options)
        assert "\n" not in str(caught.value)
        assert (tmp_path / "ledger.jsonl").read_bytes() == ledger
    private_loop(tmp_path, with_optimizer(sgd), resume=True, **options).close()


class Jittered(torch.utils.data.Dataset[Any]):
    """Records that are read anew, with numbers of the global generator, or of its own."""

    def __init__(self, x: torch.Tensor, own: int | None) -> None:
        self._x, self._own = x, None if own is None else torch.Generator().manual_seed(own)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._x[index] + torch.rand(8, generator=self._own), index % 3


@pytest.mark.parametrize("kind", ["tensors", "read", "drawn"])
@MODES
def test_other_records_are_refused_or_on_trust(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    def given(x: torch.Tensor) -> Parts:
        data: Any = TensorDataset(x, torch.arange(60) % 3)
        if kind != "tensors":
            data = Jittered(x, 1 if kind == "drawn" else None)
        return (*parts()[:3], DataLoader(data, batch_size=12))

    x = torch.randn(60, 8)
    kept = options["mode"] == "experiment" and kind != "drawn"
    with private_loop(tmp_path, given(x), **options) as private:
        run_epoch(private, steps=2)
        private.save()
        trusted = [each.text for each in private.statement().guarantees[0].assumptions if each.holds is None]
    assert any("the same records in the same order" in text for text in trusted) is not kept
    torch.rand(9)  # other numbers are drawn than before
    private_loop(tmp_path, given(x.clone()), resume=True, **options).close()
    refused = pytest.raises(RunFolderError, match="^data_loader: .* has other records, .* new folder$")
    with refused if kept else nullcontext():
        private_loop(tmp_path, given(x.flip(0)), resume=True, **options).close()
    assert '"data": null' in (tmp_path / SETTINGS_FILE).read_text() or kept


OTHER = [
    (
        {"batch_size": 20}, {},
        "data_loader: has batch_size = 20 and 60 records, and the private loop in {} was started with "
        "batch_size = 12 and 60 records, or with sample_rate = 0.2; resume it with the same, or start",
    ),
    ({"count": 72}, {}, "data_loader: has batch_size = 12 and 72 records, and .* = 12 and 60 records, or"),
    ({"count": 120, "batch_size": 24}, {}, "data_loader: has batch_size = 24 and 120 records, and .* = 12 and"),
    ({"batch_size": 20}, {"sample_rate": 0.2}, "data_loader.batch_size = 20: .* was started with 12;"),
    ({}, {"sample_rate": 0.3}, "sample_rate = 0.3: the private loop in {} was started with 0.2; resume"),
    ({}, {"max_grad_norm": 2.0}, "max_grad_norm = 2.0: .* with 1.0;"),
    ({}, {"noise_multiplier": 0.5}, "noise_multiplier = 0.5: .* with 1.0;"),
    ({}, {"seed": 4}, "seed = 4: "),
    (
        {"batch_size": 3}, {"user_ids": [n % 7 for n in range(60)], "records_per_user": 2},
        "records_per_user = 2: .* was started with None",
    ),
    ({}, {"clipping": "per_layer"}, "clipping = 'per_layer': the private loop in {} was started with 'flat'"),
    ({}, {"clipping": "per_layer", "max_grad_norm": [0.6, 0.8]}, r"max_grad_norm = \[0.6, 0.8\]: .* with 1.0;"),
]  # fmt: skip
"""Another loader, other arguments, and how the refusal begins."""


@MODES
def test_other_arguments_are_named_as_the_user_gave_them(tmp_path: Path, options: dict[str, Any]) -> None:
    with private_loop(tmp_path, **options) as private:
        private.save()
    for given, others, message in OTHER:
        if options["mode"] == "experiment" or "seed" not in others:
            with pytest.raises(RunFolderError, match="^" + message.format(re.escape(str(tmp_path)))):
                private_loop(tmp_path, parts(**given), resume=True, **{**options, **others})


def test_another_number_of_users_is_named(tmp_path: Path) -> None:
    def loop(users: int, **options: Any) -> opusim.PrivateTraining:
        options = {"user_ids": [n % users for n in range(60)], **options}
        return private_loop(tmp_path, parts(batch_size=5), records_per_user=2, **options)

    with loop(20) as private:
        private.save()
    with pytest.raises(RunFolderError, match="has batch_size = 5 and 25 users, and .* = 5 and 20 users, or"):
        loop(25, resume=True)
    with pytest.raises(RunFolderError, match="^user_ids: give other records to a user"):
        loop(20, resume=True, user_ids=[(n + n // 59) % 20 for n in range(60)])


@MODES
def test_settings_of_the_optimizer_that_a_save_replaces_are_told(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, options: dict[str, Any]
) -> None:
    def resumed(scheduled: bool = False, **changes: float) -> list[str]:
        given = parts()
        for group in given[1].param_groups:
            group.update(changes)
        if scheduled:
            torch.optim.lr_scheduler.StepLR(given[1], 3)
        recwarn.clear()
        with private_loop(tmp_path, given, resume=True, **options) as private:
            assert private.optimizer.param_groups[0]["lr"] == saved_lr
        return [str(each.message) for each in recwarn if "optimizer: was given" in str(each.message)]

    saved_lr = 0.5
    with private_loop(tmp_path, **options) as private:
        run_epoch(private, steps=2)
        private.save()
    (text,) = resumed(lr=0.1, momentum=0.9, dampening=0)
    assert text.startswith("optimizer: was given lr = 0.1 (saved: 0.5), momentum = 0.9 (saved: 0), and")
    assert text.endswith("to use the given ones, set them in optimizer.param_groups after make_private")
    assert resumed() == []
    assert resumed(scheduled=True) == []
    with private_loop(tmp_path, resume=True, **options) as private:
        schedule = torch.optim.lr_scheduler.StepLR(private.optimizer, 1, gamma=0.5)
        run_epoch(private, steps=1)
        schedule.step()
        private.save()
    saved_lr = 0.25
    assert resumed() == []  # the scheduler moved it
    assert resumed(scheduled=True) == []
    assert "lr = 0.25 (saved: 0.5)" in resumed(lr=0.25)[0]
    with private_loop(tmp_path, resume=True, **options) as private:
        torch.optim.lr_scheduler.OneCycleLR(private.optimizer, 1.0, total_steps=9)
        saved_lr = private.optimizer.param_groups[0]["lr"]
        private.save()
    assert resumed() == []  # it set a rate of its own
