"""Two release runs on neighbouring data, under the same secret randomness, differ in what is released and nowhere else.

Whatever differs in another file is a function of the private data that no noise protects. The randomness is made the
same by replacing the operating system's entropy with a counter; a run on the same data shows that nothing else varies.
"""

import hashlib
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim import training
from opusim.training.convex import trainer as convex
from opusim.training.networks import network
from opusim.training.networks.base import seeded_generator
from tests.support.faults.base import replaced
from tests.support.shared_checks import with_marks

N, FEATURES, CLASSES, CHANGED = 120, 6, 2, 7
RELEASED = {
    "checkpoint: tensors": "the model, which the guarantee covers, and what each record's label has spent",
    "checkpoint: digest of the tensors": "a digest of the above",
    "checkpoint: digest of the labels": "a digest of the noised labels",
    "checkpoint: digest of the header": "a digest of the above",
    "labels.safetensors": "the noised or randomized labels, which the ledger pays for",
    "steps.zo": "the noised scalars of every step, which the ledger pays for",
    "steps.mark.json": "length and digest of these",
}
"""What may depend on the protected values: it comes after the noise."""
BY_CHANCE = {
    "lock": "process, machine and time of the start",
    "checkpoint: inode": "which folder the run was written in",
    "checkpoint: digest of the header": "it covers the inode",
}
"""What differs between two runs on the same data under the same entropy."""
COMMON: dict[str, Any] = {
    "mode": "release",
    "epochs": 6,
    "threads": 1,
    "model": {"hidden": [8]},
    "data": {"n_classes": CLASSES, "validation_fraction": 0.0, "standardise": False},
    "sampler": {"batch_size": 60},  # a record is in none of the 12 batches with probability 2**-12
}
KINDS: dict[str, dict[str, Any]] = {
    "record": {"trainer": {"kind": "bp"}, "protection": {"kind": "record", "epsilon": 4.0}},
    "record, pdfa": {
        "trainer": {"kind": "pdfa"}, "device": {"name": "gaussian"}, "protection": {"kind": "record", "epsilon": 4.0},
    },
    "record, ulr": {"trainer": {"kind": "ulr"}, "protection": {"kind": "record", "epsilon": 4.0}},
    "record, zo": {"trainer": {"kind": "zo"}, "protection": {"kind": "record", "epsilon": 4.0}},
    "last-iterate": {
        "trainer": {"kind": "convex", "hyperplanes": 4}, "model": {}, "optimizer": {"lr": 1.0, "momentum": 0.0},
        "protection": {"kind": "last-iterate", "epsilon": 4.0},
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": 24},
    },
    "label-amplified": {"trainer": {"kind": "dfa"}, "protection": {"kind": "label-amplified", "epsilon": 4.0}},
    "label-readout": {
        "trainer": {"kind": "pdfa"}, "device": {"name": "gaussian"},
        "protection": {"kind": "label-readout", "noise": "device", "epsilon": 4.0},
    },
    "label-randomized-response": {
        "trainer": {"kind": "dfa"}, "protection": {"kind": "label-randomized-response", "epsilon": 4.0},
    },
}  # fmt: skip


def data(*, changed: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Records, of which one may be another: its label, or its features too."""
    draw = np.random.default_rng(5)
    x, y = draw.normal(size=(N, FEATURES)), np.arange(N) % CLASSES
    if changed is not None:
        y[CHANGED] = 1 - y[CHANGED]
    if changed == "records":
        x[CHANGED] = 1e6
    return x, y


@contextmanager
def known_entropy() -> Iterator[None]:
    """The operating system's entropy as a function of how often it was asked."""
    calls: Counter[str] = Counter()

    def urandom(size: int) -> bytes:
        caller = sys._getframe(1).f_code  # imports and temporary files ask too, and not always equally often
        place = f"{Path(caller.co_filename).name} {caller.co_name} {size}"  # the same in every clone
        calls[place] += 1
        return hashlib.shake_256(f"{place} {calls[place]}".encode()).digest(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", urandom)
        patch.setattr(random, "_urandom", urandom)  # behind the module secrets
        for module in (network, convex):  # first weights and hyperplanes come from torch's own entropy
            patch.setattr(module, "seeded_generator", lambda s: seeded_generator(1 if s is None else s))
        yield


def released(folder: Path, kind: str, *, changed: str | None = None) -> dict[str, bytes]:
    """The files of a release run, by their names relative to the folder."""
    with known_entropy():
        training.train({**COMMON, **KINDS[kind]}, data=data(changed=changed), folder=folder)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def parts(files: dict[str, bytes]) -> dict[str, object]:
    """The contents by name; a checkpoint is taken apart into tensors, digests and everything else."""
    found: dict[str, object] = {}
    for name, content in files.items():
        if not name.startswith("checkpoints/"):
            found[name] = content
            continue
        length = int.from_bytes(content[:8], "little")
        layout = json.loads(content[8 : 8 + length])
        header = json.loads(layout.pop("__metadata__")["opusim"])
        found[f"{name}: tensors"] = content[8 + length :]
        found[f"{name}: digest of the tensors"] = header.pop("tensors")
        found[f"{name}: digest of the labels"] = header["seal"]["files"].pop("labels.safetensors")
        found[f"{name}: inode"] = header["seal"].pop("inode")
        found[f"{name}: digest of the header"] = header.pop("digest")
        found[f"{name}: everything else"] = (layout, header)
    return found


def differing(first: dict[str, bytes], second: dict[str, bytes]) -> set[str]:
    """Names of what differs; a checkpoint's without its number. Files must have the same names and sizes."""
    assert {name: len(content) for name, content in first.items() if name != "lock"} == {
        name: len(content) for name, content in second.items() if name != "lock"
    }
    one, other = parts(first), parts(second)
    names = (name for name, value in one.items() if value != other[name])
    return {re.sub(r"^checkpoints/.*?:", "checkpoint:", name) for name in names}


FAST = {"record, pdfa", "last-iterate", "label-readout"}


@pytest.mark.parametrize("kind", with_marks(KINDS, KINDS.keys() - FAST))
def test_nothing_but_the_release_depends_on_a_record(kind: str, tmp_path: Path) -> None:
    first = released(tmp_path / "a" / "run", kind)
    chance = differing(first, released(tmp_path / "b" / "run", kind))
    what = "labels" if kind.startswith("label") else "records"
    found = differing(first, released(tmp_path / "c" / "run", kind, changed=what))
    assert chance <= set(BY_CHANCE)
    assert found <= set(RELEASED) | set(BY_CHANCE)
    assert "checkpoint: tensors" in found  # the changed record was in the training set


def test_a_leak_in_the_folder_is_found(tmp_path: Path) -> None:
    """Planted: the configuration keeps a mean of the private features."""
    runs = []
    for name, changed in (("a", None), ("b", "records")):
        mean = float(data(changed=changed)[0].mean())

        def telling(configuration: Callable[..., bytes], mean: float = mean) -> Callable[..., bytes]:
            return lambda self, config, facts: configuration(self, config, {**facts, "mean": mean > 1})

        with replaced("opusim.training.runs.folder:RunFolder.configuration", telling):
            runs.append(released(tmp_path / name / "run", "record, pdfa", changed=changed))
    with pytest.raises(AssertionError):
        assert differing(*runs) <= set(RELEASED) | set(BY_CHANCE)
