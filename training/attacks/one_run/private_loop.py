"""Audit a private loop in one training: canaries in the user's own loop, which `make_private` made private."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset

from opusim import checks
from opusim.accounting.ledger import LEDGER_FILE, read_ledger
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.findings import Audit
from opusim.training.attacks.one_run.audit import DEFAULT_CANARIES, read_canaries
from opusim.training.attacks.one_run.observers import Canaries, CraftedGradients, GradientObserver
from opusim.training.attacks.run_audit import drawn_seed
from opusim.training.config.sections import OptimizerConfig
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.private_loop.session import PrivateTraining
from opusim.training.protections.base import PrivateGradients


def audit_private_loop(
    build: Callable[[Callable[[Any], Any]], PrivateTraining],
    loop: Callable[[PrivateTraining], object],
    *,
    canaries: int = DEFAULT_CANARIES,
    seed: int | None = None,
    delta: float | None = None,
) -> Audit:
    """Run a private loop once with canaries, bound epsilon from their scores, and keep it there as `one-run.json`.

    An independent fair coin puts each canary in or leaves it out. A canary has a crafted gradient at every step, far
    longer than the clip. Batches, clip, noise and ledger are the loop's own::

        def build(plant):
            loader = DataLoader(plant(records), batch_size=64)
            return opusim.make_private(module=model, data_loader=loader, folder="audited", ...)

        found = opusim.audit_private_loop(build, train)

    Args:
        build: Makes module, optimizer, criterion, loader and private loop as for training, in experiment mode and in a
            new folder. It calls the function that it is given on the data set, once, and takes what this returns.
        loop: The user's own loop, to its end, on what `build` returned.
        canaries: m, at least 20.
        seed: Of coins and canaries, in [0, 2^63); None draws one, which the result keeps.
        delta: Of the bounds; None takes the loop's.

    Raises:
        ConfigError: There are more canaries than weights.
        ValueError: A number out of range, a loop in release mode or in several parts or processes, or `build` did not
            plant the canaries.
    """
    checks.integer(canaries=canaries, minimum=20)
    seed = drawn_seed(seed)
    # the same coins as `Canaries.drawn` draws
    inside = np.random.default_rng(derive_seed(seed, "canaries")).random(canaries) < 0.5
    sizes: list[int] = []

    def plant(records: Any) -> Any:
        """Return the records, then a blank one for each canary that is in."""
        sizes.append(len(records))
        return ConcatDataset([records, Subset(records, [0] * int(inside.sum()))])

    private = build(plant)
    checks.instance(PrivateTraining, build=private)
    with private:
        planted: Any = private.data_loader.dataset
        if len(sizes) != 1 or len(planted) != sizes[0] + inside.sum():
            raise ValueError(
                "build: must call the function that it is given once, on the data set, and give what this returns to "
                "its loader"
            )
        settings = private.settings
        if settings.mode != "experiment":
            raise ValueError(
                "mode = 'release': an audit must know the batches, which come from the operating system; audit the "
                "loop in mode = 'experiment'"
            )
        network = _view(private.module)
        drawn = Canaries.drawn(network, canaries, n_records=sizes[0], replaces=False, seed=seed)
        observer = GradientObserver(
            network,
            drawn,
            OptimizerConfig(),
            scale=settings.batch_size / settings.max_grad_norm,
            sampler=private.data_loader.sampler,
        )

        def wrap(writer: PrivateGradients) -> PrivateGradients:
            observer.writer = _Watched(writer, network, drawn, settings.max_grad_norm, observer, private)
            return observer.writer

        private.wrap_writer(wrap)
        started = time.process_time()
        observer.on_start(step=0, total_steps=settings.total_steps or 0)
        loop(private)
        observer.finish()
        spent = time.process_time() - started
    found = read_canaries(
        observer,
        inside,
        settings.relation,
        read_ledger(private.folder / LEDGER_FILE),
        seed=seed,
        delta=settings.target_delta if delta is None else delta,
        crafted="gradients",
        cpu_s=spent,
    )
    found.keep(Path(private.folder))
    return found


def _view(module: nn.Module) -> AnyModule:
    """Return a view of a module, which stays in its modes."""
    modes = {part: part.training for part in module.modules()}
    network = AnyModule(module, n_inputs=1)  # puts it into evaluation mode
    for part, training in modes.items():
        part.training = training
    return network


class _Watched(CraftedGradients):
    """Plants the canaries in the batches of a private loop, and shows each written gradient to the observer."""

    def __init__(
        self,
        writer: PrivateGradients,
        network: AnyModule,
        canaries: Canaries,
        clip_norm: float,
        observer: GradientObserver,
        private: PrivateTraining,
    ) -> None:
        super().__init__(writer, network, canaries, clip_norm=clip_norm, by_layer=False)
        self._observer, self._sampler, self._step = observer, private.data_loader.sampler, 0

    def seek(self, step: int) -> None:
        """See PrivateGradients.seek."""
        super().seek(step)
        self._step = step

    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """See PrivateGradients._write."""
        super()._write(parts, records=self._sampler.indices(self._step), public_inputs=public_inputs)
        self._observer.on_step(step=self._step + 1)
