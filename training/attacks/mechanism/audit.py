"""The self-test of a mechanism: make real runs on chosen records, and check everything that they released."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from opusim import checks
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanisms.counts import LabelArgmax, LabelCounts
from opusim.accounting.mechanisms.labels import RandomizedResponse, StagedResponse
from opusim.description.section import BadKey, merged, parse_setting
from opusim.errors import ConfigError
from opusim.progress import Progress, Show
from opusim.randomness.streams import MODES, derive_seed
from opusim.training.attacks.mechanism.checks import LAGS, MIN_STEPS, Check, MechanismAudit, checked, shared
from opusim.training.attacks.mechanism.readings import (
    STEPS,
    FinishedRun,
    read_amounts,
    released_steps,
    single_record_checks,
    small_batches,
)
from opusim.training.attacks.mechanism.subjects import (
    COUNTED,
    MODULES,
    PRIVATE_LOOP,
    QUIET_SIGMA,
    SINGLE_RECORDS,
    SUBJECTS,
    Subject,
    require_free,
    require_known_laws,
)
from opusim.training.attacks.run_audit import drawn_seed
from opusim.training.config.kinds import PROTECTIONS, ProtectionSection
from opusim.training.config.run import RunConfig, load_config
from opusim.training.data import Dataset, Split
from opusim.training.engine.callbacks import Callback
from opusim.training.engine.plan import RunPlan
from opusim.training.engine.session import train
from opusim.training.networks.network import FullyConnected
from opusim.training.private_loop.start import make_private
from opusim.training.protections.argmax_labels import LabelFrames
from opusim.training.protections.counted_labels import equidistant_pixels
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import read_array

# Labels that a camera counts, or that answer in stages: what is kept has the law that the ledger pays for. Kept counts
# are stored as the log-likelihood of every class. For identical records of label a, the losses log p(counts | a) - log
# p(counts | b) over the other labels b are sums over independent pixels, whose exact mean and covariance follow from
# the law of the digital numbers. An answer of the argmax is a randomized response. One in stages is standardised by the
# law that its own set gives it; the sum of many is normal.

_SAME = 1e-6
"""Relative difference of rates, paid for against the device's, that is rounding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossLaw:
    """The accounted law of a label's losses.

    Attributes:
        mean: Mean loss against each other label, shape (k - 1,).
        covariance: Their covariance, shape (k - 1, k - 1).
        rates_off: Largest relative difference of the rates that were paid for from those of the device.
    """

    mean: np.ndarray
    covariance: np.ndarray
    rates_off: float

    @classmethod
    def of(cls, folder: RunFolder, dataset: Dataset, mechanism: LabelCounts) -> LossLaw:
        """Return the law of a run's device at the light that its ledger names."""
        label, k = int(dataset.train.y[0]), dataset.n_classes
        with RunPlan.checked(folder.read_config(), dataset).opened_device() as device:
            if device is None:
                raise ConfigError("configuration", "device", "is missing; labels are counted by a camera")
            frames = LabelFrames.of(device, k)
            pixels = equidistant_pixels(frames.light)
            paid = np.asarray(mechanism.light)
            own = frames.light[:, pixels]
            off = math.inf if paid.shape != own.shape else float(np.max(np.abs(paid - own) / np.max(own)))
            law = frames.numbers(frames.rates(mechanism.brightest), pixels)
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.log(law.masses[label]) - np.log(np.delete(law.masses, label, axis=0))
        loss, masses = np.where(np.isfinite(loss), loss, 0.0), law.masses[label]  # (k - 1, pixels, codes)
        means = np.einsum("pc,bpc->bp", masses, loss)
        second = np.einsum("pc,apc,bpc->ab", masses, loss, loss, optimize=True)
        return cls(mean=means.sum(axis=1), covariance=second - means @ means.T, rates_off=off)

    def whitened(self, scores: np.ndarray, label: int) -> np.ndarray:
        """Return each record's losses with mean 0 and covariance I under the law, shape (records, k - 1)."""
        losses = scores[:, [label]] - np.delete(scores, label, axis=1)
        root = np.linalg.cholesky(self.covariance)
        return np.asarray(np.linalg.solve(root, (losses - self.mean).T).T)


def count_checks(finished: Sequence[FinishedRun], mechanism: LabelCounts) -> list[Check]:
    """Check kept counts of identical records: rates, mean and spread of the losses, independence (normal limits)."""
    law = LossLaw.of(finished[0].folder, finished[0].dataset, mechanism)
    label = int(finished[0].dataset.train.y[0])
    runs = np.stack(
        [law.whitened(read_array(run.folder.labels_file).astype(np.float64), label) for run in finished]
    )
    records, freedom = runs.shape[0] * runs.shape[1], runs.shape[2]
    total = records * float(np.sum(np.square(runs.mean(axis=(0, 1)))))
    squares = np.mean(np.square(runs), axis=2).ravel()
    spread = float(squares.std(ddof=1) / math.sqrt(squares.size))
    # one frame for several records: products of records up to four apart, of which the largest counts
    lagged = [np.mean(runs[:, :-lag] * runs[:, lag:], axis=2) for lag in LAGS]
    apart = max(lagged, key=lambda products: abs(products.sum()) / math.sqrt(products.size))
    products = np.mean(runs[0] * runs[1], axis=1)
    return [
        Check(
            name="counts: rates paid for",
            observed=law.rates_off,
            expected=0.0,
            standard_error=_SAME,
            p_value=1.0 if law.rates_off <= _SAME else 0.0,
            finds="light or pixels other than those accounted for",
        ),
        Check(
            name="counts: mean losses",
            observed=total,
            expected=float(freedom),
            standard_error=math.sqrt(2 * freedom),
            p_value=float(2 * min(scipy.stats.chi2.sf(total, freedom), 0.5)),
            finds="more light than accounted",
        ),
        Check.normal(
            "counts: spread of losses", float(squares.mean()), 1.0, spread, "noise weaker than accounted"
        ),
        Check.normal(
            "counts: records apart",
            float(apart.mean()),
            0.0,
            1 / math.sqrt(apart.size * freedom),
            "one frame for several records",
            comparisons=len(LAGS),
        ),
        Check.normal(
            "counts: the same in two runs",
            float(products.mean()),
            0.0,
            1 / math.sqrt(products.size * freedom),
            "frames that do not change from run to run",
        ),
    ]


def staged_checks(scores: Sequence[np.ndarray], labels: np.ndarray, mechanism: StagedResponse) -> list[Check]:
    """Check responses in stages: every answer has the law that its set and the accounted epsilon give it.

    The log-likelihoods that each of two runs keeps have shape (records, k).
    """
    first, second = (_Answers(each, labels, mechanism.step_epsilon) for each in scores)
    kept = np.stack([first.kept, second.kept])
    neighbours = kept[:, :-1] * kept[:, 1:]
    same = np.sum(first.law * second.law, axis=1)
    free = (same > 0) & (same < 1)
    equal = ((first.observed == second.observed) - same)[free] / np.sqrt((same * (1 - same))[free])
    moved = np.concatenate([first.moved, second.moved])
    parts = (
        ("response: share of labels kept", kept[kept != 0], "labels that stay more often than accounted"),
        ("response: classes moved to", moved, "moves that depend on the label"),
        ("response: records apart", neighbours[neighbours != 0], "one draw for several records"),
        ("response: equal in two runs", equal, "answers that do not change from run to run"),
    )
    # many independent numbers of variance 1, of mean 0
    means = [
        (name, float(values.mean()) if len(values) else 0.0, 0.0, 1 / math.sqrt(max(len(values), 1)), finds)
        for name, values, finds in parts
    ]
    return [Check.normal(*each) for each in means]


class _Answers:
    """Answers of one run, read off its log-likelihoods: the answer has the largest, the others of its set the least.

    Attributes:
        observed: The answers, shape (n,).
        law: Accounted probability of every answer under the true label, shape (n, k).
        kept: (kept - p) / sqrt(p (1 - p)) of labels inside their set, 0 for the others, shape (n,).
        moved: Places of answers among the classes of their set that a label moved to, standardised.
    """

    def __init__(self, scores: np.ndarray, labels: np.ndarray, epsilon: float) -> None:
        rows, own = np.arange(len(labels)), np.eye(scores.shape[1], dtype=bool)[labels]
        self.observed = np.argmax(scores, axis=1)
        among = scores == scores.min(axis=1, keepdims=True)
        among[rows, self.observed] = True
        sizes, inside = among.sum(axis=1), among[rows, labels]
        stays = 1 / (1 + (sizes - 1) * math.exp(-epsilon))
        answers = np.where(own, stays[:, None], stays[:, None] * math.exp(-epsilon))
        self.law = among * np.where(inside[:, None], answers, 1 / sizes[:, None])
        stayed = self.observed == labels
        self.kept = np.where(inside, (stayed - stays) / np.sqrt(stays * (1 - stays)), 0.0)
        choices = sizes - inside
        place = np.cumsum(among & ~own, axis=1)[rows, self.observed] - 1
        free = ~stayed & (choices > 1)
        self.moved = ((place - (choices - 1) / 2)[free]) / np.sqrt((choices[free] ** 2 - 1) / 12)


# Randomized responses


def response_checks(shifts: Sequence[np.ndarray], mechanism: RandomizedResponse | LabelArgmax) -> list[Check]:
    """Check randomized response: each label is kept with probability p, else replaced uniformly by another class.

    The shifts are those of each record's class, shape (records,), for each run.
    """
    k = int(mechanism.n_classes)
    stays = 1 / (1 + (k - 1) * math.exp(-float(mechanism.step_epsilon)))
    runs = np.stack(shifts)
    kept = runs == 0
    exact = scipy.stats.binomtest(int(kept.sum()), kept.size, stays)
    # the classes of replaced labels by Pearson's chi-squared
    counts = np.bincount(runs[runs > 0], minlength=k)[1:]
    each = max(float(counts.sum()) / (k - 1), 1e-300)
    total, degrees = float(np.sum(np.square(counts - each)) / each), k - 2
    # labels kept in records up to four apart, and equal answers in two runs (normal approximations)
    n = kept.shape[1]
    values = (kept - kept.mean()) / math.sqrt(stays * (1 - stays))
    lagged = [(float(np.sum(values[:, :-lag] * values[:, lag:])), len(kept) * (n - lag)) for lag in LAGS]
    apart, pairs = max(lagged, key=lambda found: abs(found[0]) / math.sqrt(found[1]))
    same = stays**2 + (1 - stays) ** 2 / (k - 1)
    equal = max(
        (float(np.mean(a == b)) for a, b in combinations(runs, 2)), key=lambda found: abs(found - same)
    )
    return [
        Check(
            name="response: share of labels kept",
            observed=float(kept.mean()),
            expected=stays,
            standard_error=math.sqrt(stays * (1 - stays) / kept.size),
            p_value=float(exact.pvalue),
            finds="labels that stay more often than accounted",
        ),
        Check(
            name="response: classes moved to",
            observed=total,
            expected=float(degrees),
            standard_error=math.sqrt(2 * degrees),
            p_value=1.0 if not degrees else float(scipy.stats.chi2.sf(total, degrees)),
            finds="moves that depend on the label",
        ),
        Check.normal(
            "response: records apart",
            apart / pairs,
            0.0,
            1 / math.sqrt(pairs),
            "one draw for several records",
            comparisons=len(LAGS),
        ),
        Check.normal(
            "response: equal in two runs",
            equal,
            same,
            math.sqrt(same * (1 - same) / n),
            "answers that do not change from run to run",
            comparisons=len(runs) * (len(runs) - 1) // 2,
        ),
    ]


RUNS = 2


def audit_mechanism(
    kind: str = "pdfa",
    *,
    model: str = "mlp",
    mode: str = "experiment",
    steps: int = 60,
    settings: Sequence[str] = (),
    seed: int | None = None,
    level: float = 1e-4,
    single_records: bool = True,
    progress: Show = True,
) -> MechanismAudit:
    """Test whether a trainer releases what its ledger accounts for.

    The self-test makes two runs of `opusim.train`, of at least 40 steps, on identical records. Their gradient is longer
    than the clip in every layer and touches few weights. The components that no record touches must be N(0, (z C)^2),
    independent across steps, runs and coordinates. The components along a record's contribution must show batches of
    binomial size and contributions of norm C. z, C, q and the divisor are read from the runs' ledgers.

    Where whole records are protected on Poisson batches, two more runs have records that differ and batches of two,
    which show each record's coins, its own clip, and the noise of batches that hold one record or none. Amplified
    labels have two more runs with such batches of identical records.

    With "protection.unit=user" and "protection.records_per_user=k" each record stands for a user with 2 k copies of it
    (bp, private-loop, and the feedbacks on modules).

    Args:
        kind: pdfa, dfa, tdfa, bp, ulr, zo or convex; or private-loop, for a loop that `make_private` made private.
        model: What is trained: "mlp" (of ulr, zo and convex a small model of their own), or for pdfa, dfa, tdfa and bp
            under protection.kind = 'record' also "convolution" (with a group norm) or "attention" (with an embedding).
        mode: "experiment" (seeded noise) or "release" (noise from the operating system's entropy).
        steps: Steps of each run, at least 40.
        settings: Lines "key=value" over the configuration, such as "protection.kind=label-amplified" (record by
            default), "protection.noise_multiplier=2" (1 by default), "sampler.batch_size=20", "trainer.clip=module".
        seed: Seed of the runs in experiment mode, in [0, 2^63); None draws one, which the result states.
        level: Probability of any alarm if the mechanism is as accounted, in (0, 1).
        single_records: Whether to make the runs with small batches; False saves their time.
        progress: Whether to show a bar of the steps; see `opusim.train`.

    Raises:
        ConfigError: A setting is reserved for the self-test, or is wrong.
        NoGuarantee: No guarantee covers the steps, as there is no protection.
        ValueError: A number is out of range, or the records do not exceed the clip.

    Example:
        >>> found = audit_mechanism("dfa", steps=40, seed=1, level=1e-6, single_records=False)
        >>> found.holds, len(found.checks)
        (True, 17)
    """
    checks.choice(tuple(SUBJECTS), kind=kind)
    checks.choice(("mlp", *MODULES) if SUBJECTS[kind] is SUBJECTS["pdfa"] else ("mlp",), model=model)
    checks.choice(MODES, mode=mode)
    checks.integer(steps=steps, minimum=MIN_STEPS)
    checks.in_range(0, 1, level=level)
    checks.positive(level=level)
    if mode == "release" and seed is not None:
        raise ValueError(
            f"seed = {seed}: requires mode = 'experiment'; release mode has no seeds, leave it out"
        )
    if mode == "experiment":
        seed = drawn_seed(seed)
    started = time.process_time()
    subject, config, small = _configured(kind, model, mode, steps, settings)
    small = small if single_records else None
    dataset = _dataset(subject, config)
    few = 0 if small is None else _total_steps(small, SINGLE_RECORDS)
    with (
        tempfile.TemporaryDirectory(prefix="opusim-mechanism-") as scratch,
        Progress(f"self-test of {kind}", "steps", show=progress) as bar,
    ):
        bar.start(RUNS * (_total_steps(config, config.protection.tested_records) + few))
        folders = [RunFolder(Path(scratch) / str(number)) for number in range(2 * RUNS)]
        runs = [_trained(config, subject, dataset, folder, seed, bar.advance) for folder in folders[:RUNS]]
        found, shape, accounted = _compared(runs)
        if small is not None:
            found += _small_batches(small, subject, folders[RUNS:], seed, bar.advance)
    return MechanismAudit(
        kind=kind,
        model=model,
        protection=config.protection.kind,
        mode=mode,
        accounted=accounted,
        runs=RUNS,
        steps=shape[0],
        records=len(dataset.train),
        coordinates=shape[1],
        seed=seed,
        level=level,
        cpu_s=time.process_time() - started,
        checks=shared(found, level),
        one_look=config.protection.labels_read_once,
        single_records=small is not None and config.protection.protects == "records",
        quiet_device=config.trainer.kind == "pdfa" and config.protection.protects == "records",
    )


def _trained(
    config: RunConfig,
    subject: Subject,
    dataset: Dataset,
    folder: RunFolder,
    seed: int | None,
    on_step: Callable[[], None],
    *,
    single: bool = False,
) -> FinishedRun:
    """Make one run in its folder; the folder's name keys its seed.

    A run that releases the last model only keeps no other, so its models are read while it trains.
    """
    own = 0 if seed is None else derive_seed(seed, "mechanism", int(folder.path.name)) >> 33
    model = None
    if not config.protection.labels_read_once:
        model = subject.new_model(_clip(config, subject), single=single)
    if subject is SUBJECTS[PRIVATE_LOOP]:
        states = _private_loop(config, model, dataset, folder, own, on_step)
        config = config.unchecked(data={"name": dataset.name})
    else:
        watcher = _Steps(on_step, model if config.protection.last_iterate else None)
        train(
            config.replaced(seed=own),
            data=_with_users(dataset, config),
            model=model,
            folder=folder.path,
            watcher=watcher,
            progress=False,
        )
        kept = (read_checkpoint(path).named("model.") for path in list_checkpoints(folder.checkpoints))
        states, config = watcher.states or list(kept), folder.read_config()
    return FinishedRun(folder=folder, config=config, subject=subject, dataset=dataset, states=states)


def _private_loop(
    config: RunConfig,
    model: nn.Module | None,
    dataset: Dataset,
    folder: RunFolder,
    seed: int,
    on_step: Callable[[], None],
) -> list[dict[str, Tensor]]:
    """Make one run as a private loop; return its parameters before the first step and after each step."""
    if model is None:
        raise TypeError("protection: a private loop protects whole records only")
    dataset, states = _with_users(dataset, config), []
    train_split = dataset.train
    named = FullyConnected(model).tensors  # by the names that a trainer gives them

    def keep() -> None:
        states.append({name: tensor.detach().clone() for name, tensor in named.items()})

    private = make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=config.optimizer.lr),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(
            TensorDataset(train_split.x, train_split.y), batch_size=int(config.sampler.batch_size)
        ),
        max_grad_norm=config.protection.clip,
        target_delta=config.protection.delta,
        folder=folder.path,
        noise_multiplier=config.protection.noise_multiplier,
        mode=config.mode,
        seed=seed if config.mode == "experiment" else None,
        user_ids=dataset.owners or None,
        records_per_user=config.group if config.of_users else None,
    )
    with private:
        module, optimizer, criterion, loader = private
        keep()
        for _ in range(config.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(module(x), y).backward()
                optimizer.step()
                keep()
                on_step()
    return states


def _small_batches(
    config: RunConfig,
    subject: Subject,
    folders: Sequence[RunFolder],
    seed: int | None,
    on_step: Callable[[], None],
) -> list[Check]:
    """Make runs with small batches, and check each record, or if labels are protected the noise of each step."""
    single = config.protection.protects == "records"
    dataset = _dataset(subject, config, few=True, single=single)
    runs = [_trained(config, subject, dataset, folder, seed, on_step, single=single) for folder in folders]
    if single:
        return single_record_checks([read_amounts(run) for run in runs])
    found = [released_steps(run) for run in runs]
    parts = [
        run.noise if run.signal_noise is None else np.hstack([run.noise, run.signal_noise]) for run in found
    ]
    finds = "batches without records that get no noise"
    return [Check.variance("small batches: noise of a step", list(np.concatenate(parts)), finds)]


def _compared(runs: Sequence[FinishedRun]) -> tuple[list[Check], tuple[int, int], str]:
    """Return the checks of finished runs, their steps (or records) and noise-only components, and the mechanism."""
    mechanism, dataset = runs[0].mechanism, runs[0].dataset
    shape = (len(dataset.train), 1)
    if isinstance(mechanism, RandomizedResponse):
        found = response_checks([run.shifts for run in runs], mechanism)
    elif isinstance(mechanism, StagedResponse):
        found = staged_checks([run.scores for run in runs], dataset.train.y.numpy(), mechanism)
    elif isinstance(mechanism, LabelArgmax):  # a randomized response, and nothing of the counts besides it
        values = max(len(np.unique(read_array(run.folder.labels_file))) for run in runs)
        discarded = Check(
            name="argmax: values kept of the labels",
            observed=float(values),
            expected=2.0,
            standard_error=0.0,
            p_value=1.0 if values <= 2 else 0.0,
            finds="counts that are not discarded",
        )
        found = [discarded, *response_checks([run.shifts for run in runs], mechanism)]
    elif isinstance(mechanism, LabelCounts):
        found = count_checks(runs, mechanism)
        shape = (len(dataset.train), dataset.n_classes - 1)
    else:
        released = [released_steps(run) for run in runs]
        found, shape = checked(released), released[0].noise.shape
    return found, shape, mechanism.repeated(1).describe()


def _dataset(subject: Subject, config: RunConfig, *, few: bool = False, single: bool = False) -> Dataset:
    perturbation = float(getattr(config.trainer, "perturbation", 0.0))
    count = SINGLE_RECORDS if few else config.protection.tested_records
    clip = _clip(config, subject)
    dataset = subject.dataset(None if single else count, clip=clip, perturbation=perturbation)
    return replace(dataset, n_classes=config.data.n_classes or subject.n_classes)


def _with_users(dataset: Dataset, config: RunConfig) -> Dataset:
    """Return the data set with 2 k copies of each record as those of a user, if users are protected; else itself."""
    if not config.of_users:
        return dataset
    numbers = torch.arange(len(dataset.train)).repeat_interleave(2 * config.group)
    owners = tuple(f"user {number}" for number in numbers.tolist())
    return replace(dataset, train=Split(*dataset.train.batch(numbers)), owners=owners)


def _total_steps(config: RunConfig, records: int) -> int:
    return config.epochs * max(1, round(records / config.sampler.batch_size))


class _Steps(Callback):
    """A watcher that reports every step, and keeps the parameters of a model that is trained in place."""

    def __init__(self, on_step: Callable[[], None], model: nn.Module | None) -> None:
        self._on_step, self._model = on_step, model
        self.states: list[dict[str, Tensor]] = []
        """The parameters before the first step and after each step; empty without a model."""

    @override
    def on_start(self, *, step: int, total_steps: int) -> None:
        self._keep()

    @override
    def on_step(self, *, step: int) -> None:
        self._keep()
        self._on_step()

    def _keep(self) -> None:
        if self._model is not None:
            self.states.append({name: p.detach().clone() for name, p in self._model.named_parameters()})


# Configuration

_BATCH = 40
_LABEL_CLASSES = 10


def _configured(
    kind: str, model: str, mode: str, steps: int, settings: Sequence[str]
) -> tuple[Subject, RunConfig, RunConfig | None]:
    """Return the subject, the configuration of its runs, and that of runs with small batches if there are such."""
    subject = MODULES.get(model, SUBJECTS[kind])
    asked: dict[str, Any] = {}
    for setting in settings:
        asked = merged(asked, parse_setting(setting))
    require_free(kind, asked)
    options = merged({"protection": {"kind": "record"}}, asked)
    try:
        protection = PROTECTIONS.find(options["protection"]["kind"])
    except BadKey as error:
        raise ConfigError("--set", error.key, error.reason) from error
    if protection.protects == "nothing":
        raise NoGuarantee(
            f"protection.kind = {options['protection']['kind']!r}: no guarantee covers the steps of {kind}, so there "
            "is nothing to test; use protection.kind=record"
        )
    if model != "mlp" and protection.protects != "records":
        reason = (
            f"{options['protection']['kind']!r} is tested on model = 'mlp' only; take 'record' with {model!r}"
        )
        raise ConfigError("--set", "protection.kind", reason)
    clipping = options["protection"].get("clipping", "flat")
    if clipping not in ("flat", "per_layer") or "layer_norms" in options["protection"]:
        reason = (
            f"{clipping!r} is not read by this self-test, which knows one clip over all layers and equal ones by "
            "layer; train with it and play the game of single steps: opusim audit RUN"
        )
        raise ConfigError("--set", "protection.clipping", reason)
    # the subject's keys, and the strength at which the protection is tested, if its section has those keys
    strength = dict(protection.tested_with)
    if "epsilon" in options["protection"] and "epsilon" not in strength:
        strength.pop("noise_multiplier", None)  # the calibration sets it
    defaults = merged(subject.defaults, {"protection": strength})
    own = defaults["protection"].items()
    defaults["protection"] = {key: value for key, value in own if key in protection.model_fields}
    if options["protection"].get("noise") in COUNTED:
        defaults = merged(defaults, COUNTED[options["protection"]["noise"]])
    elif "device" not in asked and kind == "pdfa":
        defaults = merged(defaults, {"device": {"noise": {"sigma": QUIET_SIGMA}}})
    trainer = "bp" if kind == PRIVATE_LOOP else kind
    values = merged(merged(_common(trainer, mode, protection, subject), defaults), options)
    config = load_config(values)
    require_known_laws(config)
    if config.of_users and subject is SUBJECTS["pdfa"] and kind != "bp":
        reason = f"'user' is tested with {kind!r} on model = 'convolution' or 'attention'; name one (--model)"
        raise ConfigError("--set", "protection.unit", reason)
    if protection.labels_read_once:
        return subject, config, None
    descent = _descent(config, subject, steps, config.protection.tested_records)
    found = load_config(values, changes=descent)
    # runs with small batches can be read: of records that differ, or of labels in secret batches
    differ = subject.single_rows is not None and "noise_multiplier" in type(config.protection).model_fields
    readable = config.protection.poisson and config.protection.bands <= 1
    if not readable or (config.protection.protects == "records" and not differ):
        return subject, found, None
    few = load_config(small_batches(values, single=config.protection.protects == "records"))
    changes = _descent(few, subject, STEPS, SINGLE_RECORDS)
    return subject, found, load_config(few, changes=changes)


def _common(kind: str, mode: str, protection: type[ProtectionSection], subject: Subject) -> dict[str, Any]:
    """Return the keys that all runs of a self-test set."""
    once = protection.labels_read_once
    values: dict[str, Any] = {
        "mode": mode,
        "threads": 1,
        "epochs": 1,
        "data": {
            "validation_fraction": 0.0,
            "n_classes": _LABEL_CLASSES if once else subject.n_classes,
            "standardise": False,
        },
        "sampler": {"batch_size": protection.tested_records if once else _BATCH},
        "trainer": {"kind": kind},
    }
    if subject.vocabulary is not None:
        values["data"] |= {"inputs": "tokens", "vocabulary": subject.vocabulary}
    if subject.points and kind != "bp":
        values["trainer"] |= {"points": list(subject.points)}
    if subject.points and kind == "pdfa":
        values["trainer"] |= {"encoding": "ternary"}
    if protection.poisson:
        values["sampler"]["scheme"] = "poisson"
    return values | ({"model": {"hidden": [8]}} if once else {})


def _descent(config: RunConfig, subject: Subject, steps: int, records: int) -> dict[str, Any]:
    """Set epochs, rate and a checkpoint after every step; raise ConfigError if the batch size does not fit."""
    size = config.sampler.batch_size
    if size > records // 4 or records % size:
        raise ConfigError(
            "--set",
            "sampler.batch_size",
            f"{size} must divide the {records} records of the self-test and be at most a quarter of them",
        )
    per_epoch = records // size
    epochs = -(-steps // per_epoch)
    found: dict[str, Any] = {
        "epochs": epochs,
        "optimizer": {"name": "sgd", "lr": subject.rate / _clip(config, subject), "momentum": 0.0},
    }
    if not config.protection.last_iterate:
        found["checkpoint"] = {"every_steps": 1, "keep": epochs * per_epoch + 1}
    return found


def _clip(config: RunConfig, subject: Subject) -> float:
    """Return C, the largest norm of a record's contribution."""
    return float(config.trainer.implementing_class().clip_norm(config, subject.n_classes))
