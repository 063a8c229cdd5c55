"""Failures that the field's issue trackers report, planted into four libraries: who notices, when, in which words?

    python -m benchmarks.attacks.silent measure     (minutes; a library that cannot be imported is skipped)
    python -m benchmarks.attacks.silent show

Each program runs twice in each library, without the fault and with it. A library *refuses* if only the faulty one ends
in an error, and *tells* if only the faulty one makes it warn or print. It is *silent* if neither happens and there is
harm, as measured on what the program released; else its construction lets *no harm* come of the fault. All libraries
run as their documentation shows, without optional checks.

fastDP is on no package index: put the folder of https://github.com/awslabs/fast-differential-privacy on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import opusim
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from opusim.accounting.ledger import LEDGER_FILE
from opusim.tables import print_table

MODULE, NAME = "benchmarks.attacks.silent", "silent_failures"
CLIP, TINY, RECORDS, BATCH, STEPS = 1.0, 1e-9, 12, 4, 20
_HARMFUL = 1e-3
"""Relative excess over a bound, or relative difference of gradients, above which there is harm."""
_OPACUS = "https://github.com/meta-pytorch/opacus"
Loss = Callable[[Tensor, Tensor], Tensor]


class NotApplicable(Exception):
    """The library has nothing into which this fault could be planted; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a program released.

    Attributes:
        harm: Whether it breaks what is claimed, or what its user expects.
        text: The figure that shows it.
    """

    harm: bool
    text: str


# A private loop in each library


class Loop(ABC):
    """A private training of a module, whose batches and steps a program takes one by one.

    Args:
        model: What is trained.
        records: Its records.
        loss: Of outputs and targets.
        whole: Full batches with almost no noise, so that the clipped sum can be read.
        options: Of the library.
    """

    ways: ClassVar[Mapping[str, dict[str, Any]]]
    """Options by which the library computes the same gradients in other ways, by name."""
    divisor: float
    """What a sum is divided by."""

    def __init__(
        self,
        model: Any,
        records: TensorDataset,
        loss: Loss = functional.cross_entropy,
        *,
        whole: bool = False,
        **options: Any,
    ) -> None:
        self.model, self.records, self.loss, self.whole = model, records, loss, whole
        self.batch = len(records) if whole else BATCH
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.SGD(trained, lr=0.5)
        self.loader: Iterable[Any] = DataLoader(records, batch_size=self.batch)
        self.open(**options)

    @abstractmethod
    def open(self, **options: Any) -> None:
        """Make the loop private."""

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step; return the released gradient."""
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()
        return gradient(self.model)

    def summed(self) -> Tensor:
        """Take a step on the first batch; return the clipped sum behind what it releases."""
        return self.learn(*next(iter(self.loader))) * self.divisor

    @property
    @abstractmethod
    def paid(self) -> int:
        """Steps that epsilon counts."""

    @property
    @abstractmethod
    def epsilon(self) -> float:
        """Epsilon at delta 1e-5."""

    def save(self, folder: Path) -> None:
        """Save what a resumed loop needs."""
        raise NotApplicable("it saves nothing, and a new engine begins to count at 0: the caller adds up")

    def restore(self, folder: Path) -> None:  # noqa: B027  # opusim restores as it opens
        """Restore what was saved."""

    def close(self) -> None:  # noqa: B027  # only opusim's ends
        """End the loop."""


class OpacusLoop(Loop):
    """Opacus, by the names of its tutorial; `poisson_sampling` is off for a step on all records."""

    ways: ClassVar[Mapping[str, dict[str, Any]]] = {
        mode: {"grad_sample_mode": mode} for mode in ("hooks", "functorch", "ghost")
    }

    @override
    def open(self, **options: Any) -> None:
        from opacus import PrivacyEngine

        self.engine, self.tokens = PrivacyEngine(), self.loss is token_loss
        quiet = (
            {"noise_multiplier": 0.0, "poisson_sampling": False} if self.whole else {"noise_multiplier": 1.0}
        )
        made = {"module": self.model, "optimizer": self.optimizer, "data_loader": self.loader}
        made |= {"criterion": nn.CrossEntropyLoss(), "max_grad_norm": CLIP, **quiet, **options}
        found = self.engine.make_private(**made)
        self.model, self.optimizer, self.loader = found[0], found[1], found[-1]
        self.divisor = float(self.optimizer.expected_batch_size)
        if len(found) == 4:  # of ghost clipping
            self.loss = self._ghost_of_tokens if self.tokens else found[2]
            self.criterion = found[2]

    def _ghost_of_tokens(self, output: Tensor, target: Tensor) -> Any:
        return self.criterion(output.flatten(0, 1), target.flatten(), shape=output.shape)

    @property
    @override
    def paid(self) -> int:
        return sum(steps for *_, steps in self.engine.accountant.history)

    @property
    @override
    def epsilon(self) -> float:
        return float(self.engine.get_epsilon(1e-5))

    @override
    def save(self, folder: Path) -> None:
        file = folder / "save.pt"
        self.engine.save_checkpoint(path=file, module=self.model, optimizer=self.optimizer)

    @override
    def restore(self, folder: Path) -> None:
        file = folder / "save.pt"
        self.engine.load_checkpoint(path=file, module=self.model, optimizer=self.optimizer)


class FastDpLoop(Loop):
    """fastDP, with the clip of Abadi et al., whose bound is C."""

    ways: ClassVar[Mapping[str, dict[str, Any]]] = {
        mode: {"clipping_mode": mode} for mode in ("MixOpt", "ghost", "MixGhostClip")
    }

    @override
    def open(self, **options: Any) -> None:
        from fastDP import PrivacyEngine

        self.divisor = self.batch
        made: dict[str, Any] = {"batch_size": self.batch, "sample_size": len(self.records), "epochs": STEPS}
        made |= {"target_delta": 1e-5, "max_grad_norm": CLIP, "clipping_fn": "Abadi"}
        made |= {"noise_multiplier": TINY if self.whole else 1.0, **options}
        self.engine = PrivacyEngine(self.model, **made)
        self.engine.attach(self.optimizer)

    @property
    @override
    def paid(self) -> int:
        return int(self.engine.steps)

    @property
    @override
    def epsilon(self) -> float:
        return float(next(iter(self.engine.get_privacy_spent().values())))


class OpusimLoop(Loop):
    """opusim, in a folder that ends with the loop unless one is given."""

    ways: ClassVar[Mapping[str, dict[str, Any]]] = {
        "one pass": {},
        "parts": {"max_physical_batch_size": 5},
        "filled rows": {"fixed_batches": True},
    }

    @override
    def open(self, **options: Any) -> None:
        self._stack = contextlib.ExitStack()
        scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        made: dict[str, Any] = {"module": self.model, "optimizer": self.optimizer, "criterion": self.loss}
        made |= {"data_loader": self.loader, "max_grad_norm": CLIP, "target_delta": 1e-5, "seed": 7}
        made |= {"noise_multiplier": TINY, "sample_rate": 1.0} if self.whole else {"noise_multiplier": 1.0}
        made |= {"folder": scratch / "loop", **options}
        self.private = self._stack.enter_context(opusim.make_private(**made))
        self.model, self.optimizer, self.loss, self.loader = self.private
        self.divisor = self.private.settings.mechanism.divisor

    @property
    @override
    def paid(self) -> int:
        self.private.close()  # steps that were reserved and not taken are given back
        ledger = opusim.read_ledger(self.private.folder / LEDGER_FILE)
        return sum(payment.steps for payment in ledger.payments)

    @property
    @override
    def epsilon(self) -> float:
        return self.private.epsilon

    @override
    def save(self, folder: Path) -> None:
        self.private.save()

    @override
    def close(self) -> None:
        self._stack.close()


class JaxLoop(Loop):
    """jax_privacy has clipped gradients, noise and accountants, and no loop: most faults have no place in it."""

    ways: ClassVar[Mapping[str, dict[str, Any]]] = {"one batch": {}, "microbatches": {"microbatch_size": 4}}

    @override
    def open(self, **options: Any) -> None:
        import jax
        import jax.numpy as jnp
        import jax_privacy

        if not self.whole:
            raise NotApplicable(
                "it has no loop: parameters and noise are arguments, and the caller counts steps"
            )
        start = {name: jnp.array(p.detach().numpy()) for name, p in self.model.named_parameters()}
        of_tokens = self.loss is token_loss

        def loss(p: Any, x: Any, y: Any) -> Any:
            if of_tokens:
                logits = p["embedding.weight"][x] @ p["linear.weight"].T + p["linear.bias"]
                each = -jax.nn.log_softmax(logits)[..., 0]
                return jnp.where(y == 0, each, 0.0).sum() / (y == 0).sum()
            logits = jnp.tanh(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean()

        clipped = jax_privacy.clipped_grad(loss, l2_clip_norm=CLIP, batch_argnums=(1, 2), **options)
        found = clipped(start, *(jnp.array(part.numpy()) for part in self.records.tensors))
        rows = [torch.tensor(jax.device_get(part)).flatten() for part in found.values()]
        self._sum = torch.cat(rows).double()

    @override
    def summed(self) -> Tensor:
        return self._sum

    @property
    @override
    def paid(self) -> int:
        raise NotApplicable("the caller accounts for the steps")

    @property
    @override
    def epsilon(self) -> float:
        raise NotApplicable("the caller accounts for the steps")


LIBRARIES: dict[str, type[Loop]] = {
    "opacus": OpacusLoop,
    "fastDP": FastDpLoop,
    "jax_privacy": JaxLoop,
    "opusim": OpusimLoop,
}


class Program:
    """A program in a library, sound or with its fault, and the stage that it reached.

    Args:
        library: The loop of the library.
        planted: Whether the fault is there.
    """

    def __init__(self, library: type[Loop], *, planted: bool) -> None:
        self.library, self.planted, self.stage, self.steps = library, planted, "make_private", 0
        self._stack = contextlib.ExitStack()

    def loop(self, model: nn.Module, records: TensorDataset, *given: Any, **options: Any) -> Loop:
        """Open a loop, which is closed with the program."""
        found = self.library(model, records, *given, **options)
        self._stack.callback(found.close)
        self.stage = "the first batch"
        return found

    def epoch(self, loop: Loop, *, skips: bool = False) -> tuple[int, list[Tensor]]:
        """Take an epoch, maybe without its second batch; return its batches and the released gradients."""
        seen, released = 0, []
        for x, y in loop.loader:
            self.stage, seen, self.steps = f"step {self.steps}", seen + 1, self.steps + 1
            if not (skips and seen == 2):
                released.append(loop.learn(x, y))
        return seen, released

    def result(self, plant: Plant) -> Any:
        """Return the effect of the program, or its error."""
        torch.manual_seed(5)
        try:
            with self._stack:
                return plant.program(self)
        except Exception as error:  # whatever a library raises
            return error


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A fault.

    Attributes:
        title: In a few words.
        what: What is planted, and what is measured.
        reports: Where it, or what leads to it, was reported.
        program: Shows its harm.
    """

    title: str
    what: str
    reports: tuple[str, ...]
    program: Callable[[Program], Effect]


# The faults


def data(records: int = RECORDS) -> TensorDataset:
    """Features and classes."""
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(RECORDS, 8, generator=draws), torch.randint(0, 3, (RECORDS,), generator=draws)
    return TensorDataset(x[:records], y[:records])


def network() -> nn.Sequential:
    """A small network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def gradient(module: nn.Module) -> Tensor:
    """The gradient of a module in one row."""
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).double()


def told_apart(sums: Callable[[int], Tensor]) -> Effect:
    """Compare what two data sets release that differ in their last record: at most C apart, by the clip."""
    apart = float((sums(RECORDS) - sums(RECORDS - 1)).norm()) / CLIP
    return Effect(harm=apart > 1 + _HARMFUL, text=f"one record moves the sum by {apart:.2f} C")


class LowRank(nn.Module):
    """A frozen linear layer with adapters, as LoRA adds them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 3).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 3)."""
        y: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return y


def _adapters(program: Program, plant: Callable[[LowRank, Loop], None]) -> Effect:
    model = LowRank()
    loop = program.loop(model, data())
    if program.planted:
        plant(model, loop)
    for _ in range(STEPS * BATCH // RECORDS + 1):
        program.epoch(loop)
    most = float(model.lora_B.weight.detach().abs().max())
    return Effect(harm=most == 0, text=f"epsilon {loop.epsilon:.2f}, and the adapters moved by {most:.3f}")


def _stale(program: Program) -> Effect:
    def materialise(model: LowRank, loop: Loop) -> None:
        for adapter in (model.lora_A, model.lora_B):
            adapter.weight = nn.Parameter(adapter.weight.detach().clone())

    return _adapters(program, materialise)


def _still(program: Program) -> Effect:
    return _adapters(program, lambda model, loop: loop.optimizer.param_groups[0].update(lr=0.0))


class Tagger(nn.Module):
    """Scores of six classes for each of ten tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(16, 8), nn.Linear(8, 6)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 10, 6)."""
        y: Tensor = self.linear(self.embedding(x))
        return y


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean loss of the tokens that count."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def _ignored(program: Program) -> Effect:
    def sums(records: int, **options: Any) -> Tensor:
        x, y = torch.zeros(records, 10, dtype=torch.int64), torch.full((records, 10), -100)
        y[:, 0] = 0
        if program.planted and records == RECORDS:
            y[-1] = 0
        return program.loop(Tagger(), TensorDataset(x, y), token_loss, whole=True, **options).summed()

    if program.library is not OpacusLoop:
        return told_apart(sums)
    hooks, ghost = (told_apart(lambda n, mode=mode: sums(n, **mode)) for mode in _hooks_and_ghost())
    return Effect(harm=hooks.harm or ghost.harm, text=f"hooks: {hooks.text}; ghost: {ghost.text}")


def _hooks_and_ghost() -> Iterator[dict[str, Any]]:
    return (OpacusLoop.ways[mode] for mode in ("hooks", "ghost"))


def _divided(program: Program) -> Effect:
    if program.library is JaxLoop:
        raise NotApplicable(
            "the divisor is an argument (`normalize_by`), and the relation one of the accountant"
        )
    related: dict[str, Any] = {}
    if program.library is OpusimLoop:
        related["relation"] = "add_or_remove_one" if program.planted else "zero_out"
    few, more = (program.loop(network(), data(n), **related).divisor for n in (8, 9))
    return Effect(harm=few != more, text=f"the divisor is {few:g} for 8 records and {more:g} for 9")


def _ways(program: Program) -> Effect:
    def build() -> nn.Module:
        if program.library is JaxLoop:
            return network()
        torch.manual_seed(0)
        layers = (
            nn.Conv2d(1, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(48, 3),
        )
        return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), *layers)

    x, y = data().tensors
    found = {}
    for name, options in program.library.ways.items():
        found[name] = program.loop(build(), TensorDataset(3 * x, y), whole=True, **options).summed()
    (name, first), *others = found.items()
    off = {other: float((one - first).norm() / first.norm()) for other, one in others}
    worst = max(off, key=lambda other: off[other])
    return Effect(harm=off[worst] > _HARMFUL, text=f"{worst} is {off[worst]:.0e} apart from {name}, relative")


def _twice(program: Program) -> Effect:
    if program.library is JaxLoop:
        raise NotApplicable("nothing is attached to a model")
    model, (x, y) = network(), data().tensors
    records = TensorDataset(100 * x, y)
    if program.planted:
        program.loop(model, records)
        program.stage = "make_private"
    size = float(program.loop(model, records, whole=True).summed().norm()) / CLIP
    return Effect(harm=size > RECORDS * (1 + _HARMFUL), text=f"{RECORDS} records add {size:.2f} C in all")


def _centred(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (inputs[0] - inputs[0].mean(dim=0),)


def _hooked(program: Program) -> Effect:
    if program.library is JaxLoop:
        raise NotApplicable("functions have no hooks, and each is applied to one record at a time")

    def sums(records: int) -> Tensor:
        x, y = data(records).tensors
        x = x.clone()
        x[RECORDS - 1 :] = 1000.0
        model = network()
        loop = program.loop(model, TensorDataset(x, y), whole=True)
        if program.planted:
            model[0].register_forward_pre_hook(_centred)
        return loop.summed()

    return told_apart(sums)


def _skipped(program: Program) -> Effect:
    loop = program.loop(network(), data())
    seen, _ = program.epoch(loop, skips=program.planted)
    return Effect(harm=loop.paid < seen, text=f"{seen} batches drawn, {loop.paid} paid for")


def _resumed(program: Program) -> Effect:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        same: dict[str, Any] = {}
        if program.library is OpusimLoop:
            same = {"folder": folder / "loop", "mode": "release", "seed": None}
        loop = program.loop(network(), data(), **same)
        taken, _ = program.epoch(loop)
        loop.save(folder)
        for number in range(1 + program.planted):
            loop.close()
            loop = program.loop(network(), data(), **same, **({"resume": True} if same else {}))
            loop.restore(folder)
            program.stage = f"resume {number + 1}"
            taken += program.epoch(loop)[0]
        return Effect(harm=loop.paid < taken, text=f"{taken} steps released, {loop.paid} paid for")


def _seeded(program: Program) -> Effect:
    model = nn.Linear(64, 3, bias=False)
    x, y = torch.zeros(RECORDS, 64), torch.zeros(RECORDS, dtype=torch.int64)
    if program.library is JaxLoop:
        noise = _noise_of_jax(carried=not program.planted)
    else:
        loop, noise = program.loop(model, TensorDataset(x, y)), []
        for step, batch in zip(range(2), loop.loader, strict=False):
            program.stage = f"step {step}"
            if program.planted:
                torch.manual_seed(0)
            noise.append(loop.learn(*batch))
    cosine = float(functional.cosine_similarity(*noise, dim=0))
    return Effect(harm=abs(cosine) > 0.99, text=f"cosine of the noise of two steps {cosine:.2f}")


def _noise_of_jax(*, carried: bool) -> list[Tensor]:
    import jax
    import jax.numpy as jnp
    import jax_privacy

    zeros = jnp.zeros(192)
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(0))
    state, noise = privatizer.init(zeros), []
    for _ in range(2):
        found, after = privatizer.update(zeros, state)
        state = after if carried else state
        noise.append(torch.tensor(jax.device_get(found)))
    return noise


_NEVER = (f"{_OPACUS}/issues/820", "https://github.com/huggingface/peft/issues/3409")
PLANTS = (
    Plant(
        title="adapters that never move: the optimizer holds other tensors",
        what="after the loop was made private, the adapters' tensors are replaced by new ones of the same values, as a "
        "model that is placed lazily does",
        reports=_NEVER,
        program=_stale,
    ),
    Plant(
        title="adapters that never move: a learning rate of 0",
        what="a schedule holds the rate at 0, and everything else looks as it always does",
        reports=_NEVER,
        program=_still,
    ),
    Plant(
        title="a mean over the tokens that count (`ignore_index`)",
        what="eleven records of one counted token and one of ten; cross-entropy with `ignore_index` and its mean",
        reports=(f"{_OPACUS}/issues/792",),
        program=_ignored,
    ),
    Plant(
        title="a divisor that depends on the number of records",
        what="batches of 4 from 8 and from 9 records, if the statement is to be about adding or removing one",
        reports=(f"{_OPACUS}/issues/819", f"{_OPACUS}/issues/571"),
        program=_divided,
    ),
    Plant(
        title="two ways to one gradient that differ",
        what="one batch without noise in each way that the library has to clip it",
        reports=(f"{_OPACUS}/issues/692",),
        program=_ways,
    ),
    Plant(
        title="a module that is private already",
        what="a module in a private loop is made private once more",
        reports=(f"{_OPACUS}/issues/636", f"{_OPACUS}/issues/582"),
        program=_twice,
    ),
    Plant(
        title="a stale hook that mixes records",
        what="a forward hook that subtracts the batch's mean comes to the first layer after the loop was made private",
        reports=("https://github.com/cybertronai/autograd-lib/issues/8",),
        program=_hooked,
    ),
    Plant(
        title="a batch that the loop skips",
        what="the loop leaves out a batch before its forward pass, as loops do with empty or small ones",
        reports=(f"{_OPACUS}/issues/161", f"{_OPACUS}/pull/164"),
        program=_skipped,
    ),
    Plant(
        title="one payment for two releases",
        what="a loop is resumed twice from one save, and both models are released",
        reports=(f"{_OPACUS}/issues/373",),
        program=_resumed,
    ),
    Plant(
        title="noise that repeats",
        what="the loop seeds torch's generator before every step; in JAX it does not carry the privatizer's state",
        reports=(f"{_OPACUS}/issues/692", "https://github.com/jax-ml/jax/pull/3646"),
        program=_seeded,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of a plant in a library.

    Attributes:
        verdict: refuses, tells, silent, no harm, or not applicable.
        when: The stage at which it was refused.
        words: Those of the library, or why the plant does not apply.
        effect: What the faulty program released, if it ran to its end.
    """

    verdict: str
    when: str = ""
    words: str = ""
    effect: str = ""


def judged(plant: Plant, library: str) -> Found:
    """Plant a fault into a library, and say what came of it.

    Raises:
        RuntimeError: The program without the fault failed.
    """
    found, heard = [], []
    for planted in (False, True):
        program, out = Program(LIBRARIES[library], planted=planted), io.StringIO()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
            warnings.simplefilter("always")
            found.append(program.result(plant))
        told = [str(one.message) for one in caught if not issubclass(one.category, ResourceWarning)]
        lines = [*told, *out.getvalue().splitlines()]  # what is collected late tells of no fault
        heard.append([line for line in dict.fromkeys(lines) if line.strip()])
    sound, faulty = found
    if isinstance(sound, NotApplicable):
        return Found(verdict="not applicable", words=str(sound))
    if isinstance(sound, Exception):
        raise RuntimeError(f"{library}, {plant.title}: the program without the fault failed") from sound
    if isinstance(faulty, Exception):
        words = f"{type(faulty).__name__}: {faulty}"
        return Found(verdict="refuses", when=program.stage, words=" ".join(words.split()))
    new = [line for line in heard[1] if line not in heard[0]]
    if new:
        return Found(verdict="tells", words=" ".join(new), effect=faulty.text)
    return Found(verdict="silent" if faulty.harm else "no harm", effect=faulty.text)


def versions() -> dict[str, str | None]:
    """Return the version of each library, or None if it cannot be imported."""
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            module = importlib.import_module(name)
            found[name] = version(name.replace("_", "-"))
        except PackageNotFoundError:
            found[name] = str(getattr(module, "__version__", "unknown"))
        except Exception:  # whatever an incomplete installation raises
            found[name] = None
    return found


def measure() -> None:
    """Plant every fault into every library that can be imported."""
    known = versions()
    for name in (name for name, found in known.items() if found is None):
        print(f"{name} cannot be imported and is skipped")
    rows = {
        plant.title: {name: asdict(judged(plant, name)) for name, found in known.items() if found is not None}
        for plant in PLANTS
    }
    save_results(NAME, {"libraries": known, "plants": rows})
    show()


def show() -> None:
    """Print what was found."""
    for title, found in load_results(NAME)["plants"].items():
        rows = [[name, *row.values()] for name, row in found.items()]
        print_table(title, ["library", "verdict", "when", "words", "released"], rows)


def page_section() -> str:
    """Return the section of the page of audits; empty without results."""
    kept = load_results(NAME)
    if not kept:
        return ""
    ran = {name: found for name, found in kept["libraries"].items() if found is not None}
    rows = [
        (plant.title, *(_cell(kept["plants"][plant.title][name]) for name in ran))
        for plant in PLANTS
        if plant.title in kept["plants"]
    ]
    listed = ", ".join(f"{name} {found}" for name, found in ran.items())
    return section(
        "Failures without a word, side by side",
        f"Each fault was planted into a small program in {listed} ({kept['date']}, {command(MODULE, 'measure')}). "
        "*Refuses*: an error ends the faulty program. *Tells*: a warning or a line that only the faulty program "
        "brings. **Silent**: neither, and the harm that is shown. *No harm*: the fault changes nothing that "
        "counts. The programs follow each library's documentation, without optional checks. What is silent is "
        "often a design: Opacus and fastDP leave the loss, the loop and torch's generator to the user (Opacus has "
        "`secure_mode` for noise from the system), and jax_privacy is functions without loop or state, whose "
        "caller carries keys and counts steps. Opacus 1.6.0 has mended `ignore_index` under ghost clipping, where "
        "it was reported, and its ghost clipping agrees with its hooks here.",
        markdown(("fault", *(f"{name} {found}" for name, found in ran.items())), rows),
        *(_told(plant, kept["plants"][plant.title]) for plant in PLANTS if plant.title in kept["plants"]),
    )


_HEARD = ("refuses", "tells")


def _cell(found: Mapping[str, str]) -> str:
    verdict, when = found["verdict"], found["when"]
    if verdict == "silent":
        return f"**silent**: {found['effect']}"
    return f"{verdict}, {when}" if when else verdict + (f": {found['effect']}" if found["effect"] else "")


def _told(plant: Plant, found: Mapping[str, Mapping[str, str]]) -> str:
    """Return what a plant is, where it was reported, and what the libraries say."""
    links = ", ".join(f"[{link.split('/')[-3]} {link.split('/')[-1]}]({link})" for link in plant.reports)
    said = "; ".join(
        f"{name} “{_short(row['words'])}”" for name, row in found.items() if row["verdict"] in _HEARD
    )
    why = "; ".join(
        f"not {name}: {row['words']}" for name, row in found.items() if row["verdict"] == "not applicable"
    )
    words = (f" Heard: {said}." if said else "") + (f" {why[0].upper()}{why[1:]}." if why else "")
    return f"*{plant.title[0].upper()}{plant.title[1:]}* ({links}): {plant.what}.{words}"


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}..."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "show"))
    {"measure": measure, "show": show}[parser.parse_args().what]()
