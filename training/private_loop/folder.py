"""The folder of a private loop: its settings, and the save that `make_private(..., resume=True)` resumes from.

With b the batch size of the user's loader and n the number of records, or of users, a step on a secret Poisson(q) batch
releases

    [sum over the batch of min(1, C / ||g_i||) g_i + N(0, (z C)^2)] / b,        q = b / n,

with g_i a gradient, or the differences of a record's loss along the directions of a `ZerothOrder`. So b is the expected
batch size, and the divisor is that constant whatever batch was drawn. Under the relation add_or_remove_one the number n
is private: q is then a constant of the user's choice.

A save is a file of torch that holds the content, another such file in bytes, and a sealed JSON document
(`opusim.training.runs.storage`) with the digests of the content and of the loop's settings, the length of the ledger
and the inode of a release's folder. A new save is read back before it replaces the last one, so that an unreadable
value never spoils a good save. Values of numpy are kept as bytes, since torch reads none back.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import math
import os
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from opusim import checks
from opusim.accounting.composition import Budget, calibrate_noise
from opusim.accounting.explanation import LedgerFacts, Statement
from opusim.accounting.guarantee import Adjacency, Assumption, Unit
from opusim.accounting.journal import Position, Witness
from opusim.accounting.ledger import LEDGER_FILE, Enforcement, LedgerContent, Mode, Program, read_ledger
from opusim.accounting.mechanisms.records import (
    ADAPTIVE_RECORDS,
    ADAPTIVE_USERS,
    OWN_READING,
    STANDARDISED,
    RecordCentral,
)
from opusim.accounting.mechanisms.zeroth_order import ZEROTH_ORDER_GAUSSIAN, ZoGaussian
from opusim.accounting.theorems import NOISY_SUM, about_rounding
from opusim.files import parse_json, read_bytes, require_regular, write_file
from opusim.randomness.seeds import MAX_SEED
from opusim.randomness.streams import MODES, SystemUniforms
from opusim.training.errors import RunFolderError
from opusim.training.networks.user_code import own_files
from opusim.training.protections.clipping import FLAT, Clipping
from opusim.training.runs.folder import SAME_RECORDS, versions
from opusim.training.runs.storage import (
    digest_of,
    read_record,
    record_json,
    sealed,
    unsealed,
    warn_unsealed,
    write_record,
)

SETTINGS_FILE = "private.json"
TAKES_NO_GRADIENTS = (
    "its optimizer is ZerothOrder, and this audit plants gradients; audit a run of opusim.train with trainer.kind = "
    "'zo' instead, whose steps are the same"
)
_VERSION = 1
_LONGEST = 200
"""Letters of the names of a module's parts, at most."""
_GIVEN = {
    "batch_size": "data_loader.batch_size",
    "clipping.kind": "clipping",
    "directions": "optimizer, directions of ZerothOrder",
    "device": "module, feedback from a device",
}
"""What a user gives for a field of `PrivacySettings` that is no argument of `make_private`."""
_CHECKED = (
    "the criterion was called on one record at a time, with the module's outputs as they were returned, and neither it "
    "nor the module in training was given a number or a tensor without a row for each record",
    "each batch that was drawn was trained on before the next, and buffers and Python attributes of the module were as "
    "before after each pass",
)
_TRUSTED = (
    "the data set, the collate function and what stands between loader, module and criterion treat each record "
    "separately: no inputs, targets or weights of a record are computed from others, such as by subtracting a batch's "
    "mean or dividing by its size, and constants and `example_inputs` do not come from the data",
    "the criterion keeps no memory of other records, and the loss is multiplied by a constant only",
    "only what the private loop releases moves the parameters, neither losses nor other figures of the records are "
    "released, and none of them decides what the loop does, when it ends or whether it is resumed",
)
"""Conditions that a user's loop may break and no code here can check."""
_TRUSTED_IF_SHARED = (
    "every process reads the same data set, and all of them and their network may see the records"
)
_TRUSTED_OF_USERS = (
    "the loop gives the rows of a batch to module and criterion in the loader's order, which says whose they are, and "
    "a loop that is resumed in release mode has the same `user_ids`, of which a release keeps no digest"
)


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """The constants of a private loop, as its folder keeps them.

    Attributes:
        mode: "experiment", whose noise and batches come from `seed`, or "release", where they come from the operating
            system.
        seed: In [0, 2^64) in experiment mode, None in release mode.
        relation: Which data sets are neighbours: zero_out or add_or_remove_one.
        sample_rate: q, the probability with which a record enters a batch, in (0, 1].
        batch_size: b, the constant that divides the noisy sum.
        max_grad_norm: C, above 0.
        noise_multiplier: z, above 0.
        target_delta: Delta of every statement, in [0, 1).
        target_epsilon: The budget, or None without one.
        epochs: Planned length, or None.
        records_per_user: k, the records of a user that a step uses at most, if users are drawn in the place of records;
            else None.
        users: Digest of the users' records; None in release mode, which keeps nothing of the records.
        data: Digest of the data set's records (`start.digest_of_data`); None in release mode, which keeps nothing of
            them, and if the data set draws numbers of its own.
        clipping: How a gradient is brought within C.
        directions: K of a loop with `ZerothOrder`, which releases sums of loss differences; None for gradients.
        device: Whether a device computes feedback in the module; None if that is not known.
    """

    mode: Mode
    seed: int | None
    relation: Adjacency
    sample_rate: float
    batch_size: int
    max_grad_norm: float
    noise_multiplier: float
    target_delta: float
    target_epsilon: float | None
    epochs: int | None
    records_per_user: int | None = None
    users: str | None = None
    data: str | None = None
    clipping: Clipping = FLAT
    directions: int | None = None
    device: bool | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which each record is used once on average: the nearest whole number to 1 / q."""
        return max(1, round(1 / self.sample_rate))

    @property
    def total_steps(self) -> int | None:
        """Planned number of steps, or None."""
        return None if self.epochs is None else self.epochs * self.steps_per_epoch

    @cached_property
    def mechanism(self) -> RecordCentral | ZoGaussian:
        """What one step releases."""
        if self.directions is not None:
            return ZoGaussian(
                noise_multiplier=self.noise_multiplier,
                sampling_probability=self.sample_rate,
                clip_norm=self.max_grad_norm,
                divisor=float(self.batch_size),
                directions=self.directions,
                joint_clip=self.directions > 1,
                relation=self.relation,
            )
        return RecordCentral(
            noise_multiplier=self.noise_multiplier,
            sampling_probability=self.sample_rate,
            clip_norm=self.max_grad_norm,
            divisor=float(self.batch_size),
            relation=self.relation,
            records_per_user=self.records_per_user,
            clipping=self.clipping.kind,
            count_noise=self.clipping.count_noise,
        )

    @property
    def is_calibrated(self) -> bool:
        """Whether the noise multiplier is the least that keeps `epochs` within `target_epsilon`."""
        if self.target_epsilon is None or self.total_steps is None:
            return False
        return self.calibrated().noise_multiplier == self.noise_multiplier

    def calibrated(self) -> Self:
        """Return the settings with the least noise that keeps `epochs` within `target_epsilon`; NoGuarantee if none."""
        found, _ = calibrate_noise(
            replace(self, noise_multiplier=1.0).mechanism.repeated(self.total_steps or 1),
            target_epsilon=self.target_epsilon or math.inf,
            delta=self.target_delta,
        )
        return replace(self, noise_multiplier=found.noise_multiplier)

    @property
    def budget(self) -> Budget | None:
        """The privacy budget, or None without `target_epsilon`."""
        if self.target_epsilon is None:
            return None
        return Budget(epsilon=self.target_epsilon, delta=self.target_delta)

    @classmethod
    def resolve(cls, *, records: int, noise_multiplier: float | None, **given: Any) -> Self:
        """Check the arguments of `make_private`, and fill in those that are missing.

        `records` is n, of users if users are drawn; z None takes the least noise that keeps `epochs` within
        `target_epsilon`. Raises ValueError, which names it, for a value that is missing or out of range, and
        NoGuarantee if no noise is enough.
        """
        seed = given["seed"]
        checks.choice(MODES, mode=given["mode"])
        if given["mode"] == "release" and seed is not None:
            raise ValueError(
                f"seed = {seed}: noise and batches of mode = 'release' come from the operating system; leave it out"
            )
        if given["mode"] == "experiment":
            given["seed"] = int(SystemUniforms().random(1)[0] * 2**53) if seed is None else seed
            checks.integer(minimum=0, maximum=MAX_SEED, seed=given["seed"])
            given["seed"] = int(given["seed"])
        checks.choice((str(Adjacency.ZERO_OUT), str(Adjacency.ADD_OR_REMOVE_ONE)), relation=given["relation"])
        given["relation"] = Adjacency(given["relation"])
        rate, batch_size = given["sample_rate"], given["batch_size"]
        if rate is not None:
            checks.in_unit_interval(closed="right", sample_rate=rate)
        elif given["relation"] is Adjacency.ADD_OR_REMOVE_ONE:
            raise ValueError(
                "relation = 'add_or_remove_one' needs sample_rate, a constant of your choice, since the number of "
                "records is private; give it, or take relation = 'zero_out', under which that number is public"
            )
        elif batch_size > records:
            raise ValueError(
                f"data_loader.batch_size = {batch_size}: exceeds the {records} "
                f"{'records' if given['records_per_user'] is None else 'users'}; take at most as many"
            )
        given["sample_rate"] = float(batch_size / records if rate is None else rate)
        given["clipping"], given["max_grad_norm"] = given["clipping"].with_norms(given["max_grad_norm"])
        checks.positive(max_grad_norm=given["max_grad_norm"])
        checks.in_unit_interval(closed="left", target_delta=given["target_delta"])
        given["max_grad_norm"] = float(given["max_grad_norm"])
        given["target_delta"] = float(given["target_delta"])
        if given["target_epsilon"] is not None:
            checks.positive(target_epsilon=given["target_epsilon"])
            given["target_epsilon"] = float(given["target_epsilon"])
        if given["epochs"] is not None:
            checks.integer(minimum=1, epochs=given["epochs"])
            given["epochs"] = int(given["epochs"])
        if noise_multiplier is not None:
            checks.positive(noise_multiplier=noise_multiplier)
            return cls(noise_multiplier=float(noise_multiplier), **given)
        if given["target_epsilon"] is None or given["epochs"] is None:
            raise ValueError(
                "noise_multiplier is missing; give it, or target_epsilon and epochs, for which the least noise is found"
            )
        return cls(noise_multiplier=1.0, **given).calibrated()

    def begin(self, folder: Path) -> None:
        """Write the settings of a new private loop into its folder; raise RunFolderError if that holds other work."""
        if (folder / SETTINGS_FILE).exists():
            raise RunFolderError(
                f"folder {folder} holds a private loop already; give resume=True to resume it from its last save, or "
                "another folder for a new one"
            )
        if (folder / LEDGER_FILE).exists():
            raise RunFolderError(f"folder {folder} holds the ledger of other work; choose an empty folder")
        write_record(folder / SETTINGS_FILE, self, _VERSION)

    @classmethod
    def stored(cls, folder: Path) -> Self:
        """Return the settings that a folder holds; raise RunFolderError if they were changed, or are none."""
        remedy = "restore it from a copy, or start a new folder"
        if folder.is_dir() and not (folder / SETTINGS_FILE).exists():
            raise RunFolderError(
                f"{folder / SETTINGS_FILE} is missing, the settings of the private loop in this folder; {remedy}"
            )
        what = "the settings of a private loop"
        return read_record(folder / SETTINGS_FILE, cls, _VERSION, what=what, remedy=remedy)

    def _given(self) -> dict[str, Any]:
        """Return the fields in JSON's types; norms of layers stand where `make_private` takes them."""
        found = record_json(self, _VERSION)
        rule = found.pop("clipping")
        found["max_grad_norm"] = rule.pop("layer_norms") or self.max_grad_norm
        return found | {f"clipping.{name}": value for name, value in rule.items()}

    def require_same(self, folder: Path, *, found: Collection[str], records: int | None = None) -> Self:
        """Return the settings of a folder, or raise RunFolderError unless they agree with these.

        Fields that are `found`, not given, take the folder's values. `sample_rate` follows from the number of records,
        or users, unless it was given (None).
        """
        if not any((folder / name).exists() for name in (SETTINGS_FILE, CHECKPOINT_FILE)):
            raise RunFolderError(
                f"folder {folder} holds no private loop to resume; leave resume out to start one"
            )
        stored = type(self).stored(folder)
        ours, theirs = self._given(), stored._given()
        # earlier versions kept no digest of users or records, and said nothing of a device
        known = {*found, *(name for name in ("users", "data", "device") if getattr(stored, name) is None)}
        changed = [name for name in ours if ours[name] != theirs[name] and name not in known]
        if not changed:
            return stored
        # what follows from the loader comes last
        name = min(changed, key=lambda name: name in ("sample_rate", "batch_size", "users", "data"))
        place, unit = f"the private loop in {folder}", "records" if self.records_per_user is None else "users"
        if name == "users":
            raise RunFolderError(
                f"user_ids: give other records to a user than {place} was started with; resume it with the same IDs, "
                "or start a new folder"
            )
        if name == "data":
            raise RunFolderError(
                f"data_loader: its data set has other records, or another order of them, than {place} was started "
                "with; resume it with the same data set, or start a new folder"
            )
        if name in ("sample_rate", "batch_size") and records is not None:
            b, q = stored.batch_size, stored.sample_rate
            raise RunFolderError(
                f"data_loader: has batch_size = {self.batch_size} and {records} {unit}, and {place} was started with "
                f"batch_size = {b} and {b / q:.6g} {unit}, or with sample_rate = {q:.4g}; resume it with the same, or "
                "start a new folder"
            )
        raise RunFolderError(
            f"{_GIVEN.get(name, name)} = {ours[name]!r}: {place} was started with {theirs[name]!r}; resume it with the "
            "same arguments, or start a new folder"
        )


def enforcement(settings: PrivacySettings, *, processes: int, program: Program | None = None) -> Enforcement:
    """Return what `make_private` checks at each step, for the ledger; a loop that fails a check releases nothing."""
    hypotheses = _hypotheses(Unit.RECORD if settings.records_per_user is None else Unit.USER)
    by = f"make_private of opusim {version('opusim')}"
    return Enforcement(by=by, processes=processes, hypotheses=hypotheses, program=program)


@cache
def _hypotheses(unit: Unit) -> tuple[str, ...]:
    """Return what `make_private` checks if a unit is protected."""
    # names what the other theorems do, and more
    theorem = ADAPTIVE_RECORDS if unit is Unit.RECORD else ADAPTIVE_USERS
    rounding = about_rounding(True, enforced=True, what=NOISY_SUM, counted=True, unit=unit)
    rounding += about_rounding(True, enforced=True)
    texts = (*theorem.checked_by_code, *ZEROTH_ORDER_GAUSSIAN.checked_by_code)
    texts += tuple(one.text for one in rounding if one.holds)  # what is on trust stays so
    return tuple(dict.fromkeys(text for text in (*texts, *_CHECKED) if text != STANDARDISED))


def program_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Any = None,
    *others: Any,
    fixed_batches: bool | None = None,
) -> Program:
    """Return the program that runs in this process: module, optimizer, criterion and other code of the training."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    script = None if file is None or not Path(file).is_file() else Path(file).resolve()
    parts = textwrap.shorten(", ".join(type(part).__name__ for part in module.children()), _LONGEST)
    plain = criterion
    while isinstance(plain, partial):
        plain = plain.func
    name = "" if plain is None else getattr(plain, "__qualname__", type(plain).__name__)
    return Program(
        versions=versions(),
        script="" if script is None else _path_text(script),
        sha256="" if script is None else _sha256(script),
        module=f"{type(module).__name__}({parts})",
        optimizer=_optimizer_text(optimizer),
        files={
            _path_text(
                file.relative_to(script.parent) if script and file.is_relative_to(script.parent) else file
            ): _sha256(file)
            for file in own_files((*module.modules(), criterion, *others))
            if file != script
        },
        fixed_batches=fixed_batches,
        criterion=textwrap.shorten(name, _LONGEST),
    )


def _path_text(path: Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _optimizer_text(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's class, its learning rates, and the settings that are not the class's defaults."""
    kind: Any = type(optimizer)  # mypy takes the hash of its objects for its own
    groups = [{**group, **getattr(optimizer, "settings", {})} for group in optimizer.param_groups]
    shown: dict[str, list[str]] = {}
    for name, default in _arguments(kind).items():
        values = [group[name] for group in groups if name in group]
        if name != "lr" and all(value is default for value in values):
            continue
        found = [_setting(value) for value in values]
        if None not in found and (name == "lr" or any(text != _setting(default) for text in found)):
            shown[name] = list(dict.fromkeys(text for text in found if text is not None))
    told = ", ".join(f"{name}={' and '.join(values)}" for name, values in shown.items() if values)
    return type(optimizer).__name__ + (f"({told})" if told else "")


@cache
def _arguments(optimizer: Any) -> dict[str, Any]:
    """Return the names of the arguments that a class of optimizers takes, and their defaults."""
    defaults: dict[str, Any] = {}
    for kind in optimizer.__mro__:
        parameters = (
            inspect.signature(vars(kind)["__init__"]).parameters.values() if "__init__" in vars(kind) else ()
        )
        defaults = {one.name: one.default for one in parameters} | defaults
        if parameters and all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters):
            break  # bases are given nothing by name that this class does not name
    return defaults


def optimizer_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, str | None]]:
    """Return the settings of each parameter group as text; a rate that a scheduler moves is that which it began with.

    A value is None if it is no number and no text. A cyclic scheduler sets all rates, so that none is returned.
    """
    kind: Any = type(optimizer)
    names = _arguments(kind)
    return [
        {
            name: _setting(group.get(f"initial_{name}", group[name]))
            for name in names
            if name in group and "max_lr" not in group
        }
        for group in optimizer.param_groups
    ]


def _setting(value: Any) -> str | None:
    """Return a setting of an optimizer as text, or None if it is neither a number, a text, None, nor a few of these."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        parts = [_setting(part) for part in value]
        return None if None in parts else f"({', '.join(part for part in parts if part is not None)})"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if value is None or isinstance(value, bool | int | str) else None


def loop_statement(
    content: LedgerContent,
    settings: PrivacySettings,
    checked_against: Sequence[str],
    *,
    delta: float | None = None,
) -> Statement:
    """Return what the ledger of a private loop may state: what the loop checked, and all that it takes on trust.

    A hypothesis counts as checked if the ledger says so (`LedgerContent.checked`) and this version checks it, too. The
    ledger was read with the witnesses of these names.
    """
    ours = enforcement(settings, processes=1).hypotheses
    checked = content.checked.intersection(ours)
    trusted = [
        *_TRUSTED,
        *([_TRUSTED_IF_SHARED] if any(one and one.processes > 1 for one in content.enforcements) else []),
        *([SAME_RECORDS] if settings.data is None else []),
        *([] if settings.records_per_user is None else [_TRUSTED_OF_USERS]),
    ]
    further = [Assumption(text=text, holds=True if text in checked else None) for text in _CHECKED]
    further += [Assumption(text=text) for text in trusted]
    guarantees = []
    for one in content.guarantees(delta=delta):
        stated = [
            each for each in one.assumptions if settings.device is not False or each.text != OWN_READING
        ]
        own = [replace(each, holds=True) if each.text in checked else each for each in stated]
        guarantees.append(replace(one, assumptions=(*own, *further)))
    return Statement(
        mode=content.mode,
        guarantees=tuple(guarantees),
        mechanisms=tuple(content.mechanisms),
        ledger=LedgerFacts.of(content, checked_against),
        run=None,
        versions={name: number for name, number in versions().items() if name in ("python", "opusim")},
    )


def stated_loop(folder: Path, *, delta: float | None = None) -> Statement:
    """Return what the folder of a private loop may state, at delta or that of the loop.

    Raises LedgerCorrupt if the ledger is missing, changed, or older than the last save, NoGuarantee if no step was paid
    for yet, and RunFolderError if settings or save were changed.
    """
    settings, witnesses = PrivacySettings.stored(folder), []
    if (folder / CHECKPOINT_FILE).exists():
        witnesses.append(Witness(name=CHECKPOINT_FILE, position=_read_outer(folder / CHECKPOINT_FILE)[1]))
    content = read_ledger(folder / LEDGER_FILE, witnesses=witnesses)
    content.require_paid(f"folder {folder}")
    return loop_statement(content, settings, [each.name for each in witnesses], delta=delta)


CHECKPOINT_FILE = "private.pt"
VERSION = 2
_WITHOUT_DIGEST = 1
_REMEDY = "restore it from a copy"
_NUMPY = "opusim.numpy"
"""The only key of a mapping that stands for a value of numpy."""


def write_save(folder: Path, state: Mapping[str, Any], *, ledger: Position, bound: bool) -> None:
    """Replace the save in a folder: what a resumed loop needs, and how far the ledger reaches.

    `bound` allows it to be resumed in this very folder only. The last save is kept on TypeError, which names a value
    that could not be read back, and on OSError.
    """
    content = io.BytesIO()
    try:
        _write_readable(_encoded(state), content)
    except Exception as error:  # whatever a user's object raises
        is_endless = isinstance(error, RecursionError)  # such as a list that holds itself
        place = "a value that is nested too deep" if is_endless else _unreadable(state) or "the state"
        raise TypeError(
            f"save: {place} cannot be read back; give tensors, arrays, numbers, texts, and lists and mappings of "
            "these. The last save is kept"
        ) from error
    raw = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
    facts = sealed(
        {"content": digest_of(content.getbuffer())},
        ledger=ledger.to_json(),
        settings=digest_of(read_bytes(folder / SETTINGS_FILE)),
        inode=folder.stat().st_ino if bound else None,
    )
    file = io.BytesIO()
    torch.save({"version": VERSION, "facts": json.dumps(facts), "content": raw}, file)
    write_file(folder / CHECKPOINT_FILE, file.getbuffer())


def read_save(folder: Path) -> tuple[dict[str, Any], Position]:
    """Return the state in the last save of a folder, and how far the ledger reached.

    Raises RunFolderError if there is none, it is unreadable or was changed, or the folder is a copy of a release's.
    """
    file = folder / CHECKPOINT_FILE
    if not file.exists():
        raise RunFolderError(f"folder {folder} has no save to resume from; start a new folder")
    content, ledger, inode = _read_outer(file)
    if inode not in (None, folder.stat().st_ino):
        raise RunFolderError(
            f"folder {folder} is a copy, and no ledger counts what two copies release; resume in the folder "
            "where the loop was started, or start a new one"
        )
    if isinstance(content, dict):
        return content, ledger
    return _decoded(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)), ledger


def _read_outer(file: Path) -> tuple[dict[str, Any] | memoryview, Position, int | None]:
    """Return the content of a save, how far the ledger reached, and the inode of a release's folder.

    The content is the state itself in a version before 0.3, else the bytes of a file of torch. Raises RunFolderError if
    it cannot be read or was changed.
    """
    try:
        require_regular(file)
        outer = torch.load(file, map_location="cpu", weights_only=True)
        number = outer["version"]
    except Exception as error:  # torch.load has no error of its own
        raise _unreadable_save(file, error) from error
    if number not in (_WITHOUT_DIGEST, VERSION):
        raise RunFolderError(f"{file} is of another version; resume it with the opusim that wrote it")
    try:
        if number == _WITHOUT_DIGEST:
            ledger, inode = Position.from_json(outer["ledger"]), outer["inode"]
            warn_unsealed(file)
            return outer, ledger, inode
        raw = outer["content"].numpy().data
        facts = {**parse_json(outer["facts"]), "content": digest_of(raw)}
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise _unreadable_save(file, error) from error
    # The digests must fit.
    _, seal = unsealed(file, facts, remedy=_REMEDY)
    settings = file.with_name(SETTINGS_FILE)
    if seal.get("settings") != digest_of(read_bytes(settings)):
        raise RunFolderError(f"{settings} is not the file that {file.name} was written under; {_REMEDY}")
    return raw, Position.from_json(seal["ledger"]), seal["inode"]


def _unreadable_save(file: Path, error: Exception) -> RunFolderError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return RunFolderError(f"{file} is not a readable save ({reason}); {_REMEDY}")


def _write_readable(value: Any, file: io.BytesIO) -> None:
    """Write a value and read it again, as a resumed loop will; raises whatever either raises."""
    torch.save(value, file)
    file.seek(0)
    torch.load(file, map_location="cpu", weights_only=True)


def _unreadable(value: Any, place: str = "") -> str | None:
    """Return the place and the value of the first part that cannot be read back, or None if all of it can."""
    try:
        _write_readable(_encoded(value), io.BytesIO())
    except Exception:  # whatever a user's object raises
        parts: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
        if isinstance(value, list | tuple):
            parts = enumerate(value)
        inner = (_unreadable(part, f"{place}[{key!r}]" if place else str(key)) for key, part in parts)
        return next((found for found in inner if found), f"{place} = {checks.short(value)}")
    return None


def _encoded(value: Any) -> Any:
    """Return a value whose numpy values are replaced by bytes; the value itself if it holds none."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        if value.dtype.hasobject or value.dtype.names:
            return value  # which is refused
        raw = value.tobytes()
        kept = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        return {_NUMPY: (value.dtype.str, value.shape, isinstance(value, np.generic), kept)}
    return _mapped(value, _encoded)


def _decoded(value: Any) -> Any:
    """Undo `_encoded`."""
    if type(value) is dict and value.keys() == {_NUMPY}:
        kind, shape, is_scalar, raw = value[_NUMPY]
        array = np.zeros(shape, dtype=kind)
        if math.prod(shape) and array.itemsize:
            array = np.frombuffer(bytearray(raw.numpy()), dtype=kind).reshape(shape)
        return array[()] if is_scalar else array
    return _mapped(value, _decoded)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the entries of a list, tuple or mapping; return the value itself if nothing changes."""
    if type(value) in (dict, OrderedDict):
        found = {key: change(each) for key, each in value.items()}
        return type(value)(found) if any(found[key] is not value[key] for key in found) else value
    if type(value) in (list, tuple):
        items = [change(each) for each in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    return value


def generator_states() -> list[Tensor]:
    """Return the states of torch's generators: that of the CPU, then one for each GPU."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def set_generator_states(states: Sequence[Tensor]) -> None:
    """Set what `generator_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))
