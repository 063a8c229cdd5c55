"""The guarantee of everything that ran together, and a budget that stops training before a step would exceed it.

Equal mechanisms are merged into one with the sum of their steps; the class that defines their `guarantees` states them.
Those that are not additive (`Mechanism.additive`) are merged only by the ledger of their run, which pays for each part.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.guarantee import Adjacency, BudgetExceeded, Guarantee, NoGuarantee, Unit
from opusim.accounting.mechanism import Mechanism


def guarantees(mechanisms: Iterable[Mechanism], *, delta: float, enforced: bool = False) -> list[Guarantee]:
    """Return the guarantees of all mechanisms together, whatever their order.

    Args:
        mechanisms: Mechanisms that ran on the same data; at least one. One that is not additive stands for a whole run.
        delta: In [0, 1).
        enforced: Whether the code that ran them checked the assumptions.

    Returns:
        One guarantee or several, such as a paper's claim next to what is proven.

    Raises:
        NoGuarantee: No accountant covers these mechanisms together.
        ValueError: delta outside [0, 1).
    """
    checks.in_unit_interval(closed="left", delta=delta)
    ran = list(mechanisms)
    apart = [mechanism for mechanism in ran if not mechanism.additive]
    merged = [*merge(one for one in ran if one.additive), *sorted(apart, key=_text)]
    if not merged:
        raise NoGuarantee("mechanisms: there is none, nothing was paid for; name at least one")
    accountants = {mechanism.accountant for mechanism in merged}
    if len(accountants) != 1:
        kinds = ", ".join(sorted({mechanism.kind for mechanism in merged}))
        raise NoGuarantee(f"mechanisms {kinds}: no accountant covers them together; state each separately")
    return accountants.pop().guarantees(merged, delta=delta, enforced=enforced)


def merge(mechanisms: Iterable[Mechanism]) -> list[Mechanism]:
    """Merge equal mechanisms of one run, adding their steps; the order does not depend on the input's."""
    steps: dict[Mechanism, int] = {}
    for mechanism in mechanisms:
        one = mechanism.repeated(1)
        steps[one] = steps.get(one, 0) + mechanism.steps
    return [one.repeated(count) for one, count in sorted(steps.items(), key=lambda item: _text(item[0]))]


def _text(mechanism: Mechanism) -> str:
    return json.dumps(mechanism.to_json(), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The largest epsilon at a delta that may be spent; only proven guarantees count.

    Attributes:
        epsilon: Above 0, finite.
        delta: In [0, 1).
        unit: What is protected, or None to take what the mechanisms protect.
        adjacency: The relation, or None to take what the mechanisms state.
    """

    epsilon: float
    delta: float
    unit: Unit | None = None
    adjacency: Adjacency | None = None
    _known: dict[tuple[Mechanism, ...], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _fitting: dict[Mechanism, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.in_unit_interval(closed="left", delta=self.delta)

    def spent(self, mechanisms: Sequence[Mechanism]) -> float:
        """Return epsilon of these mechanisms together: 0 for none of them, infinity without a proven guarantee."""
        merged = tuple(merge(mechanisms))
        if not merged:
            return 0.0
        if merged not in self._known:
            counted = [
                one.epsilon
                for one in guarantees(merged, delta=self.delta)
                if one.is_proven and self.unit in (None, one.unit) and self.adjacency in (None, one.adjacency)
            ]
            self._known[merged] = min(counted, default=math.inf)
        return self._known[merged]

    def would_exceed(self, paid: Sequence[Mechanism], more: Sequence[Mechanism]) -> bool:
        """Return whether paying for more would exceed the budget.

        Fewer steps of one mechanism never cost more, so nothing is computed if more steps are known to fit.
        """
        total = merge([*paid, *more])
        one = total[0].repeated(1) if len(total) == 1 else None
        if one is not None and total[0].steps <= self._fitting.get(one, 0):
            return False
        exceeds = not self.spent(total) <= self.epsilon  # NaN would exceed
        if one is not None and not exceeds:
            self._fitting[one] = total[0].steps
        return exceeds

    def affordable(
        self, paid: Sequence[Mechanism], step: Sequence[Mechanism], wanted: int, *, ahead: int = 0
    ) -> int:
        """Return how many steps, up to `wanted`, fit; one computation if all of them do.

        Args:
            paid: Mechanisms that are paid for.
            step: Mechanisms of one step.
            wanted: Steps asked for, at least 1.
            ahead: Steps that the whole run may ask for; if all fit, later calls compute nothing.
        """
        checks.integer(minimum=1, wanted=wanted)

        def too_many(steps: int) -> bool:
            return self.would_exceed(
                paid, [mechanism.repeated(steps * mechanism.steps) for mechanism in step]
            )

        if ahead > wanted:
            too_many(ahead)
        return bisect.bisect_left(range(1, wanted), True, key=too_many) if too_many(wanted) else wanted

    def require(self, paid: Sequence[Mechanism], step: Sequence[Mechanism]) -> None:
        """Refuse a step that would exceed the budget.

        Raises:
            BudgetExceeded: It would exceed the budget and must not be taken.
            NoGuarantee: No proven guarantee covers it.
        """
        if not self.would_exceed(paid, step):
            return
        if math.isinf(self.spent(step)):
            raise NoGuarantee(
                f"budget of epsilon {self.epsilon:g} at delta {self.delta:g}: {step[0].describe()} has no proven "
                "finite guarantee; choose a protection that has one"
            )
        raise BudgetExceeded(
            f"budget: the next step would cost more than epsilon {self.epsilon:g} at delta {self.delta:g} "
            f"(spent {self.spent(paid):.4g}); it was not taken. Use more noise, fewer steps or a larger budget"
        )


_MOST_NOISE = 1e6
_LEAST_NOISE = 1e-2
_RELATIVE = 1e-4

M = TypeVar("M", bound=Mechanism)


def calibrate_noise(mechanism: M, *, target_epsilon: float, delta: float) -> tuple[M, Guarantee]:
    """Return the mechanism with the least noise whose proven epsilon is at most the target.

    Args:
        mechanism: All other parameters; the search begins at its own noise.
        target_epsilon: Above 0, finite.
        delta: In [0, 1).

    Returns:
        The mechanism with its noise set (within 0.02 % above the least), and its guarantee, whose epsilon is at most
        the target.

    Raises:
        NoGuarantee: No noise reaches the target, or the mechanism has no noise to set.
    """
    checks.positive(target_epsilon=target_epsilon)

    def gap(log_noise: float) -> float:
        noisy = mechanism.with_noise(math.exp(log_noise))
        return min(_proven(noisy, delta).epsilon, 1e9) - target_epsilon

    low, high = _bracket(gap, math.log(mechanism.noise), target_epsilon, delta, mechanism)
    noise = math.exp(numerics.find_root(gap, low, high, xtol=_RELATIVE) if low < high else high)
    for _ in range(4):
        answer = mechanism.with_noise(noise)
        guarantee = _proven(answer, delta)
        if guarantee.epsilon <= target_epsilon:
            return answer, guarantee
        noise *= 1 + _RELATIVE
    answer = mechanism.with_noise(math.exp(high))
    return answer, _proven(answer, delta)


def _bracket(
    gap: Callable[[float], float], start: float, target: float, delta: float, mechanism: Mechanism
) -> tuple[float, float]:
    """Return logarithms of noise that enclose the target's, or two equal ones if even the least noise reaches it."""
    low = high = min(max(start, math.log(_LEAST_NOISE)), math.log(_MOST_NOISE))
    if gap(high) > 0:
        while gap(high) > 0:
            if high >= math.log(_MOST_NOISE):
                remedy = "allow more epsilon or delta, fewer steps, smaller batches"
                if delta == 0 and math.isinf(_proven(mechanism.with_noise(_MOST_NOISE), delta).epsilon):
                    remedy = (
                        "its epsilon is infinite at delta = 0 whatever the noise; allow a delta, such as 1e-5"
                    )
                raise NoGuarantee(
                    f"target_epsilon = {target:g}: {mechanism.kind.replace('_', '-')} with noise up to {_MOST_NOISE:g} "
                    f"does not reach it at delta = {delta:g}; {remedy}"
                )
            low, high = high, min(high + math.log(2), math.log(_MOST_NOISE))
        return low, high
    while gap(low) <= 0:
        if low <= math.log(_LEAST_NOISE):
            return low, low
        low, high = max(low - math.log(2), math.log(_LEAST_NOISE)), low
    return low, high


def _proven(mechanism: Mechanism, delta: float) -> Guarantee:
    """The strongest proven guarantee, or the first one, which says why there is none."""
    stated = guarantees([mechanism], delta=delta)
    proven = [guarantee for guarantee in stated if guarantee.is_proven]
    return min(proven, key=lambda guarantee: guarantee.epsilon) if proven else stated[0]
