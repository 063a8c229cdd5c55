"""Failures that the field's issue trackers report, planted into four libraries: who notices, when, in which words?

    python -m benchmarks.attacks.silent measure     (minutes; a library that cannot be imported is skipped)

Each program runs twice in each library, without the fault and with it. A library *refuses* if only the faulty one ends
in an error, and *tells* if only the faulty one makes it warn or print. It is *silent* if neither happens and there is
harm, as measured on what the program released; else its construction lets *no harm* come of the fault. All libraries
run as their documentation shows, without optional checks. The faults' texts are in silent.toml.

fastDP is on no package index: put the folder of https://github.com/awslabs/fast-differential-privacy on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import opusim
from benchmarks.options import program
from benchmarks.results_file import save_results
from opusim.accounting.ledger import LEDGER_FILE

MODULE, NAME = "benchmarks.attacks.silent", "silent_failures"
CLIP, TINY, RECORDS, BATCH, STEPS = 1.0, 1e-9, 12, 4, 20
_HARMFUL = 1e-3
"""Relative excess over a bound, or relative difference of gradients, above which there is harm."""
PLANTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
Ways = dict[str, dict[str, Any]]


class Effect(NamedTuple):
    """What a program released: if it breaks what is claimed or what its user expects, and the figure that shows it."""

    harm: bool
    text: str


# A private loop in each library


class Loop:
    """A private training of a module, whose batches and steps a program takes one by one.

    Attributes:
        ways: Options by which the library computes the same gradients in other ways, by name.
        divisor: What a sum is divided by.
    """

    ways: ClassVar[Ways]
    divisor: float

    def __init__(
        self,
        model: Any,
        records: TensorDataset,
        loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
        *,
        whole: bool = False,
        **options: Any,
    ) -> None:
        """Make the loop private; `whole` takes full batches with almost no noise, so that the sum can be read."""
        self.model, self.records, self.loss, self.whole = model, records, loss, whole
        self.batch = len(records) if whole else BATCH
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.SGD(trained, lr=0.5)
        self.loader: Iterable[Any] = DataLoader(records, batch_size=self.batch)
        self.open(**options)

    def open(self, **options: Any) -> None:
        """Make the loop private."""
        raise NotImplementedError

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step; return the released gradient."""
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).double()

    def summed(self) -> Tensor:
        """Take a step on the first batch; return the clipped sum behind what it releases."""
        return self.learn(*next(iter(self.loader))) * self.divisor

    def paid(self) -> int:
        """Return the steps that epsilon counts."""
        raise NotImplementedError

    def epsilon(self) -> float:
        """Return epsilon at delta 1e-5."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Save what a resumed loop needs."""

    def restore(self, folder: Path) -> None:
        """Restore what was saved."""

    def close(self) -> None:
        """End the loop."""


class OpacusLoop(Loop):
    """Opacus, by the names of its tutorial; `poisson_sampling` is off for a step on all records."""

    ways: ClassVar[Ways] = {mode: {"grad_sample_mode": mode} for mode in ("hooks", "functorch", "ghost")}

    def open(self, **options: Any) -> None:
        from opacus import PrivacyEngine

        self.engine, of_tokens = PrivacyEngine(), self.loss is token_loss
        quiet = {"noise_multiplier": 0.0, "poisson_sampling": False}
        made = {"module": self.model, "optimizer": self.optimizer, "data_loader": self.loader}
        made |= quiet if self.whole else {"noise_multiplier": 1.0}
        found = self.engine.make_private(
            **made, criterion=nn.CrossEntropyLoss(), max_grad_norm=CLIP, **options
        )
        self.model, self.optimizer, self.loader = found[0], found[1], found[-1]
        self.divisor = float(self.optimizer.expected_batch_size)
        if len(found) == 4:  # of ghost clipping
            ghost = found[2]
            self.loss = (
                (lambda z, y: ghost(z.flatten(0, 1), y.flatten(), shape=z.shape)) if of_tokens else ghost
            )

    def paid(self) -> int:
        return sum(steps for *_, steps in self.engine.accountant.history)

    def epsilon(self) -> float:
        return float(self.engine.get_epsilon(1e-5))

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(path=folder / "save.pt", module=self.model, optimizer=self.optimizer)

    def restore(self, folder: Path) -> None:
        self.engine.load_checkpoint(path=folder / "save.pt", module=self.model, optimizer=self.optimizer)


class FastDpLoop(Loop):
    """fastDP, with the clip of Abadi et al., whose bound is C."""

    ways: ClassVar[Ways] = {mode: {"clipping_mode": mode} for mode in ("MixOpt", "ghost", "MixGhostClip")}

    def open(self, **options: Any) -> None:
        from fastDP import PrivacyEngine

        self.divisor = self.batch
        made: dict[str, Any] = {"batch_size": self.batch, "sample_size": len(self.records), "epochs": STEPS}
        made |= {"target_delta": 1e-5, "max_grad_norm": CLIP, "clipping_fn": "Abadi"}
        made |= {"noise_multiplier": TINY if self.whole else 1.0, **options}
        self.engine = PrivacyEngine(self.model, **made)
        self.engine.attach(self.optimizer)

    def paid(self) -> int:
        return int(self.engine.steps)

    def epsilon(self) -> float:
        return float(next(iter(self.engine.get_privacy_spent().values())))


class OpusimLoop(Loop):
    """opusim, in a folder that ends with the loop unless one is given."""

    ways: ClassVar[Ways] = {
        "one pass": {},
        "parts": {"max_physical_batch_size": 5},
        "filled rows": {"fixed_batches": True},
    }

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

    def paid(self) -> int:
        self.private.close()  # steps that were reserved and not taken are given back
        ledger = opusim.read_ledger(self.private.folder / LEDGER_FILE)
        return sum(payment.steps for payment in ledger.payments)

    def epsilon(self) -> float:
        return self.private.epsilon

    def save(self, folder: Path) -> None:
        self.private.save()

    def close(self) -> None:
        self._stack.close()


class JaxLoop(Loop):
    """jax_privacy's clipped gradients, of all records: it has noise and accountants, and no loop."""

    ways: ClassVar[Ways] = {"one batch": {}, "microbatches": {"microbatch_size": 4}}

    def open(self, **options: Any) -> None:
        import jax
        import jax.numpy as jnp
        import jax_privacy

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

    def summed(self) -> Tensor:
        return self._sum


LIBRARIES: dict[str, type[Loop]] = {
    "opacus": OpacusLoop,
    "fastDP": FastDpLoop,
    "jax_privacy": JaxLoop,
    "opusim": OpusimLoop,
}


class Program:
    """A program in a library, sound or with its fault, and the stage that it reached."""

    def __init__(self, library: type[Loop], *, planted: bool) -> None:
        self.library, self.planted, self.stage, self.steps = library, planted, "make_private", 0
        self._stack = contextlib.ExitStack()

    def loop(self, model: nn.Module, records: TensorDataset, *given: Any, **options: Any) -> Loop:
        """Open a loop, which is closed with the program."""
        found = self.library(model, records, *given, **options)
        self._stack.callback(found.close)
        self.stage = "the first batch"
        return found

    def epoch(self, loop: Loop, *, skips: bool = False) -> int:
        """Take an epoch, maybe without its second batch; return its batches."""
        seen = 0
        for x, y in loop.loader:
            self.stage, seen, self.steps = f"step {self.steps}", seen + 1, self.steps + 1
            if not (skips and seen == 2):
                loop.learn(x, y)
        return seen

    def result(self, plant: str) -> Any:
        """Return the effect of a plant's program, or its error."""
        torch.manual_seed(5)
        try:
            with self._stack:
                return PROGRAMS[plant](self)
        except Exception as error:  # whatever a library raises
            return error


# The faults


def data(records: int = RECORDS) -> TensorDataset:
    """Return features and classes."""
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(RECORDS, 8, generator=draws), torch.randint(0, 3, (RECORDS,), generator=draws)
    return TensorDataset(x[:records], y[:records])


def network() -> nn.Sequential:
    """Return a small network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def told_apart(sums: Callable[[int], Tensor]) -> Effect:
    """Compare what two data sets release that differ in their last record: at most C apart, by the clip."""
    apart = float((sums(RECORDS) - sums(RECORDS - 1)).norm()) / CLIP
    return Effect(apart > 1 + _HARMFUL, f"one record moves the sum by {apart:.2f} C")


class LowRank(nn.Module):
    """A frozen linear layer with adapters, as LoRA adds them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 3).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, shape (batch, 3)."""
        y: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return y


def _adapters(program: Program, plant: Callable[[LowRank, Loop], object]) -> Effect:
    model = LowRank()
    loop = program.loop(model, data())
    if program.planted:
        plant(model, loop)
    for _ in range(STEPS * BATCH // RECORDS + 1):
        program.epoch(loop)
    most = float(model.lora_B.weight.detach().abs().max())
    return Effect(most == 0, f"epsilon {loop.epsilon():.2f}, and the adapters moved by {most:.3f}")


def _materialise(model: LowRank, loop: Loop) -> None:
    for adapter in (model.lora_A, model.lora_B):
        adapter.weight = nn.Parameter(adapter.weight.detach().clone())


class Tagger(nn.Module):
    """Scores of six classes for each of ten tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(16, 8), nn.Linear(8, 6)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, shape (batch, 10, 6)."""
        y: Tensor = self.linear(self.embedding(x))
        return y


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of the tokens that count."""
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
    modes = {mode: OpacusLoop.ways[mode] for mode in ("hooks", "ghost")}
    found = {mode: told_apart(lambda n, given=given: sums(n, **given)) for mode, given in modes.items()}
    text = "; ".join(f"{mode}: {each.text}" for mode, each in found.items())
    return Effect(any(each.harm for each in found.values()), text)


def _divided(program: Program) -> Effect:
    relation = {"relation": "add_or_remove_one" if program.planted else "zero_out"}
    given: dict[str, Any] = relation if program.library is OpusimLoop else {}
    few, more = (program.loop(network(), data(n), **given).divisor for n in (8, 9))
    return Effect(few != more, f"the divisor is {few:g} for 8 records and {more:g} for 9")


def _ways(program: Program) -> Effect:
    def build() -> nn.Module:
        if program.library is JaxLoop:
            return network()
        torch.manual_seed(0)
        convolution = (nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 6, 3, padding=1))
        return nn.Sequential(*convolution, nn.GroupNorm(2, 6), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))

    x, y = data().tensors
    found = {
        name: program.loop(build(), TensorDataset(3 * x, y), whole=True, **options).summed()
        for name, options in program.library.ways.items()
    }
    (name, first), *others = found.items()
    off = {other: float((one - first).norm() / first.norm()) for other, one in others}
    worst = max(off, key=lambda other: off[other])
    return Effect(off[worst] > _HARMFUL, f"{worst} is {off[worst]:.0e} apart from {name}, relative")


def _twice(program: Program) -> Effect:
    model, (x, y) = network(), data().tensors
    records = TensorDataset(100 * x, y)
    if program.planted:
        program.loop(model, records)
        program.stage = "make_private"
    size = float(program.loop(model, records, whole=True).summed().norm()) / CLIP
    return Effect(size > RECORDS * (1 + _HARMFUL), f"{RECORDS} records add {size:.2f} C in all")


def _centred(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (inputs[0] - inputs[0].mean(dim=0),)


def _hooked(program: Program) -> Effect:
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
    seen, paid = program.epoch(loop, skips=program.planted), loop.paid()
    return Effect(paid < seen, f"{seen} batches drawn, {paid} paid for")


def _resumed(program: Program) -> Effect:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        same: dict[str, Any] = {}
        if program.library is OpusimLoop:
            same = {"folder": folder / "loop", "mode": "release", "seed": None}
        loop = program.loop(network(), data(), **same)
        taken = program.epoch(loop)
        loop.save(folder)
        for number in range(1 + program.planted):
            loop.close()
            loop = program.loop(network(), data(), **same, **({"resume": True} if same else {}))
            loop.restore(folder)
            program.stage = f"resume {number + 1}"
            taken += program.epoch(loop)
        paid = loop.paid()
        return Effect(paid < taken, f"{taken} steps released, {paid} paid for")


def _seeded(program: Program) -> Effect:
    noise = []
    if program.library is JaxLoop:
        noise = _noise_of_jax(carried=not program.planted)
    else:
        x, y = torch.zeros(RECORDS, 64), torch.zeros(RECORDS, dtype=torch.int64)
        loop = program.loop(nn.Linear(64, 3, bias=False), TensorDataset(x, y))
        for step, batch in zip(range(2), loop.loader, strict=False):
            program.stage = f"step {step}"
            if program.planted:
                torch.manual_seed(0)
            noise.append(loop.learn(*batch))
    cosine = float(functional.cosine_similarity(*noise, dim=0))
    return Effect(abs(cosine) > 0.99, f"cosine of the noise of two steps {cosine:.2f}")


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


PROGRAMS: dict[str, Callable[[Program], Effect]] = {
    "stale": lambda program: _adapters(program, _materialise),
    "still": lambda program: _adapters(
        program, lambda _, loop: loop.optimizer.param_groups[0].update(lr=0.0)
    ),
    "ignored": _ignored,
    "divided": _divided,
    "ways": _ways,
    "twice": _twice,
    "hooked": _hooked,
    "skipped": _skipped,
    "resumed": _resumed,
    "seeded": _seeded,
}
"""Show the harm of each plant."""


def judged(plant: str, library: str) -> dict[str, str]:
    """Plant a fault into a library; return the verdict, the stage of a refusal, the words and the effect.

    Raises:
        RuntimeError: The program without the fault failed.
    """
    if why := PLANTS[plant].get("without", {}).get(library):
        return _found("not applicable", words=why)
    found, heard = [], []
    for planted in (False, True):
        run, out = Program(LIBRARIES[library], planted=planted), io.StringIO()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
            warnings.simplefilter("always")
            found.append(run.result(plant))
        told = [str(one.message) for one in caught if not issubclass(one.category, ResourceWarning)]
        lines = [*told, *out.getvalue().splitlines()]  # what is collected late tells of no fault
        heard.append([line for line in dict.fromkeys(lines) if line.strip()])
    sound, faulty = found
    if isinstance(sound, Exception):
        raise RuntimeError(f"{library}, {plant}: the program without the fault failed") from sound
    if isinstance(faulty, Exception):
        words = f"{type(faulty).__name__}: {faulty}"
        return _found("refuses", when=run.stage, words=" ".join(words.split()))
    if new := [line for line in heard[1] if line not in heard[0]]:
        return _found("tells", words=" ".join(new), effect=faulty.text)
    return _found("silent" if faulty.harm else "no harm", effect=faulty.text)


def _found(verdict: str, *, when: str = "", words: str = "", effect: str = "") -> dict[str, str]:
    return {"verdict": verdict, "when": when, "words": words, "effect": effect}


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
    ran = [name for name, found in known.items() if found is not None]
    print(f"skipped, as they cannot be imported: {', '.join(known.keys() - set(ran)) or 'none'}")
    rows = {text["title"]: {name: judged(plant, name) for name in ran} for plant, text in PLANTS.items()}
    save_results(NAME, {"libraries": known, "plants": rows})


if __name__ == "__main__":
    program(measure)
