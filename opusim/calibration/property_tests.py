"""Decisions on a family of statistical tests: which properties hold, at a stated rate of false alarms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from opusim.p_values import bonferroni, doubt

FAMILY_ALARM = 1e-4
"""Probability that a sound device fails any test of a family."""


@dataclass(frozen=True, kw_only=True)
class PropertyTest:
    """A property that a law needs, tested.

    Attributes:
        text: the property, and the statistic that speaks against it most.
        p_value: probability of a statistic at least as far off if the property holds, corrected for the number of
            statistics of this property.
        level: p-value below which the property does not hold.
        needed: whether the certified law needs the property.
    """

    text: str
    p_value: float
    level: float
    needed: bool = True

    @property
    def holds(self) -> bool:
        """Whether the p-value is at least the level."""
        return self.p_value >= self.level

    @property
    def standard_errors(self) -> float:
        """The two-sided Gaussian deviate of the p-value, at least 0; infinite for a p-value of 0."""
        from scipy.special import ndtri

        return abs(float(ndtri(self.p_value / 2)))


def decide(
    properties: Mapping[str, Mapping[str, float]],
    *,
    alarm: float = FAMILY_ALARM,
    not_needed: Collection[str] = (),
) -> tuple[PropertyTest, ...]:
    """Bonferroni decisions: a property's smallest p-value times its statistics, at alarm over the properties.

    Args:
        properties: for each property the p-value of each statistic, in [0, 1].
        alarm: probability that any property is rejected although all hold, in (0, 1).
        not_needed: properties that the certified law does without.
    """
    level, found = alarm / max(len(properties), 1), []
    for text, p_values in properties.items():
        worst = min(p_values, key=lambda name: doubt(p_values[name]))
        p_value = bonferroni(p_values[worst], len(p_values))
        shown = text if p_value >= level else f"{text} ({worst})"
        found.append(PropertyTest(text=shown, p_value=p_value, level=level, needed=text not in not_needed))
    return tuple(found)
