"""Guarantees and theorems in plain words: who is protected from whom, what epsilon means, and what it rests on.

`large_delta` is the one rule of every command and statement for a delta that is too large for the number of records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from opusim.accounting.explanation import guarantee_rows, number
from opusim.accounting.guarantee import Adjacency, Guarantee, Release, Status, Unit
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.theorems import Theorem
from opusim.tables import table_text, wrapped

LARGE_DELTA = (
    "delta is at least 1 / records, so a mechanism that publishes one whole record or more, on average, can have the "
    "same delta at an epsilon of 0; choose a delta well below 1 / records"
)


def explain(guarantee: Guarantee, *, seed_stored: bool = False) -> str:
    """Return a paragraph for a reader who knows no differential privacy, and a list of what the guarantee rests on.

    Args:
        guarantee: The guarantee.
        seed_stored: Whether the run keeps the seed of its noise (experiment mode).
    """
    text = f"{guarantee.status.value.capitalize()}: {_meaning(guarantee)}"
    if seed_stored and guarantee.is_proven:
        text += (
            " This run stored the seed of its noise, from which the noise can be rebuilt: the number holds for the "
            "same run in release mode, not for this one."
        )
    lines = [text]
    for holds, heading in (
        (False, "Not true here:"),
        (None, "Taken on trust, not checked:"),
        (True, "Checked:"),
    ):
        lines += _listed(heading, [each.text for each in guarantee.assumptions if each.holds is holds])
    return "\n".join([*lines, f"Source: {guarantee.source}."])


def guarantees_text(guarantees: Sequence[Guarantee], *, seed_stored: bool = False) -> str:
    """Return guarantees as a table with a paragraph for each, as wide as the output; see `explain`."""
    rows = [
        {key: cell for key, cell in row.items() if key != "notes"}
        for row in guarantee_rows(guarantees, seed_stored=seed_stored)
    ]
    parts = [table_text("", list(rows[0]), [list(row.values()) for row in rows])]
    for guarantee in guarantees:
        lines = explain(guarantee, seed_stored=seed_stored).splitlines()
        parts.append("\n".join(wrapped(line, indent="  ") for line in lines) + "\n")
    if any(guarantee.theorem is not None for guarantee in guarantees):
        parts.append("`opusim explain THEOREM` states a theorem, its hypotheses and its proof.\n")
    return "\n".join(parts).rstrip("\n")


def explain_theorem(theorem: Theorem) -> str:
    """Return a theorem as paragraphs: statement, proof, hypotheses, reference, and the code that computes it."""
    parts = [
        f"{theorem.name}: {theorem.title}",
        f"Theorem. {theorem.statement}",
        f"Proof. {theorem.proof}",
        *_listed("Hypotheses that training code checks:", theorem.checked_by_code),
        *_listed("Hypotheses taken on trust:", theorem.trusted),
        f"Reference: {theorem.reference}." if theorem.reference else "",
        f"Computed by: {theorem.code}.",
        f"Derived in the documentation: {theorem.page}." if theorem.page else "",
    ]
    return "\n".join(part for part in parts if part)


def most_hits(epsilon: float, delta: float, false_alarms: float) -> float:
    """Return the largest true positive rate of any attack: min(1, e^eps f + delta, 1 - e^-eps (1 - f - delta)).

    Args:
        epsilon: At least 0, possibly infinite.
        delta: In [0, 1).
        false_alarms: f in [0, 1], the attack's false positive rate.
    """
    if epsilon > 700:  # e^epsilon overflows doubles
        return 1.0
    first = math.exp(epsilon) * false_alarms + delta
    return min(1.0, first, 1 - math.exp(-epsilon) * max(1 - false_alarms - delta, 0.0))


def _meaning(guarantee: Guarantee) -> str:
    is_label = guarantee.unit is Unit.LABEL
    protected = "a record's label" if is_label else "a whole record"
    if guarantee.status is Status.CLAIMED:
        said = (
            f"gives epsilon {number(guarantee.epsilon)} at delta {guarantee.delta:g}"
            if math.isfinite(guarantee.epsilon)
            else "gives no finite epsilon here, because what it needs does not hold"
        )
        formula = ""
        if guarantee.formula_value is not None:
            formula = f" (its formula only, hypotheses taken as given: {number(guarantee.formula_value)})"
        return (
            f"a paper's formula for {protected} {said}{formula}. No proof covers what ran: this is the paper's claim, "
            "not a protection to rely on."
        )
    if math.isinf(guarantee.epsilon):
        return (
            f"no finite number bounds what can be learnt about {protected}. The reason: {guarantee.reason}."
        )
    # what the attacker sees and asks
    seen = "all that is released (of a training run: the model after every update)"
    if guarantee.release is Release.LAST_ITERATE:
        seen = "the trained model, and nothing of its training"
    question = "whether any one record was among the training data"
    if is_label:
        question = "which of two labels a record had, though all features are public"
    elif guarantee.adjacency is Adjacency.REPLACE_ONE:
        question = "which of two values a record had"
    elif guarantee.adjacency is Adjacency.ZERO_OUT:
        question += " or its place was empty (zero_out: the number of places is public)"
    # how well the best attack answers
    share = 100 * most_hits(guarantee.epsilon, guarantee.delta, 0.01)
    hits, what = (
        f"at most {share:.3g} %" if share < 99.95 else "possibly all",
        "label" if is_label else "value",
    )
    attack = (
        f"an attack that reports a {what} wrongly for 1 % of the records that have the other one reports it rightly "
        f"for {hits} of those that have it"
    )
    if not is_label and guarantee.adjacency is not Adjacency.REPLACE_ONE:
        attack = (
            f"an attack that takes 1 % of the records that were not used for used ones finds {hits} of those that "
            "were"
        )
    return (
        f"an attacker sees {seen}, knows all other records, and asks {question}. With epsilon "
        f"{number(guarantee.epsilon)} at delta {guarantee.delta:g}, {attack} (blind guessing: 1 %)."
    )


def _listed(heading: str, texts: Sequence[str]) -> list[str]:
    return [heading, *(f"- {text}" for text in texts)] if texts else []


def large_delta(delta: float, mechanisms: Sequence[Mechanism], *, records: float | None = None) -> str | None:
    """Return one line that warns of a delta of at least 1 / n, or None.

    A mechanism that publishes each record in full with probability delta is (0, delta)-differentially private, and
    expects to publish n delta of n records. From delta = 1 / n on, a statement therefore allows that a whole record is
    published.

    Args:
        delta: Of the statement, in [0, 1).
        mechanisms: What is paid for. Their public constants tell n, if they have any (`Mechanism.public_records`).
        records: n, only if it is public; None takes the least that the mechanisms tell.
    """
    told = [one.public_records for one in mechanisms] if records is None else [records]
    n = min((float(number) for number in told if number is not None), default=None)
    if n is None or delta * n < 1 - 1e-9:
        return None
    return f"delta = {delta:g} with {n:,.6g} records (1 / records is {1 / n:.2g}): {LARGE_DELTA}"
