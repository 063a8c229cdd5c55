"""An audit in words, for readers who do not know differential privacy: the game, the result, and what it means."""

from __future__ import annotations

import math
from dataclasses import replace

from opusim.accounting.audit import AuditPlan, AuditResult, Estimator, OneRunResult, Verdict, guesses_bound
from opusim.accounting.explanation import number
from opusim.accounting.guarantee import Guarantee, Status
from opusim.training.attacks.findings import Audit, Played, Role

_WEAK = 0.5
"""The power below which an audit is called weak."""


def paragraphs(audit: Audit) -> list[str]:
    """Return the audit as text: the game, the result, what it means for each statement, and the controls."""
    texts = [_game(audit), *_adversaries(audit), _result(audit), *_statements(audit), _power(audit)]
    return [text for text in (*texts, _controls(audit), audit.note) if text]


def verdict(audit: Audit) -> str:
    """Return the result in one or two sentences."""
    best, claim = audit.strongest, audit.strongest.claim
    bound, ceiling = best.result.epsilon_lower, best.result.ceiling
    found = (
        f"The strongest attack ({best.attack}) shows an epsilon of at least {bound:.2f}; all bounds together hold with "
        f"{100 * audit.confidence:.0f} % confidence"
    )
    whose = "one step" if best.scope == "step" else "the run"
    if audit.refuted:
        says = _refutation(audit)
        if claim is not None:
            says = says or f"That is above the {claim.status.value} {number(claim.epsilon)} of {whose}."
        return f"REFUTED. {found}. {says}"
    if claim is None or math.isinf(claim.epsilon):
        return f"{found}. No theorem gives a finite epsilon to compare it with."
    share = bound / claim.epsilon if claim.epsilon else 1.0
    weak = _weakness(audit)
    if not audit.scores() and ceiling <= claim.epsilon:
        weak = f"So few trials cannot show more than {ceiling:.2f}, so they could not refute it."
    ideal = f"; ideal scores would show {ceiling:.2f}" if audit.scores() else ""
    return (
        f"Not refuted. {found}. That is {100 * share:.0f} % of the {claim.status.value} {number(claim.epsilon)} of "
        f"{whose}{ideal}.{weak and ' '}{weak} An audit never proves privacy; a better attack may exist."
    )


def _game(audit: Audit) -> str:
    result = audit.strongest.result
    plan = result.plan
    if audit.scores():
        parts = f"the run's own sampler, clip, noise, optimizer and ledger ({audit.game})"
        played = (
            f"one training of {audit.steps} steps with {parts}, and {audit.trials} canaries with crafted "
            f"{audit.crafted}. A fair coin put each canary in or left it out, independently. Each adversary scores "
            "every canary."
        )
        if audit.played is Played.FINAL_MODELS:
            played = (
                f"{audit.trials} trainings of {audit.steps} steps each, with {parts}. A fair coin put one crafted "
                "record in or left it out of each training, independently, and the adversary scores every final model."
            )
        text = (
            f"Game: {played} Each bound holds with confidence {plan.confidence:.4g}, so that all of them hold with "
            f"confidence {audit.confidence:.4g}. The ceiling is what ideal scores would give at the claimed epsilon "
            "with as many scores; a number near it says that no better attack would have shown more."
        )
        if audit.looks == 1:
            return text
        return (
            f"{text} The scores were read {audit.looks} times, with other numbers of trainings or at other deltas, and "
            f"stopping once the outcome pleases errs more often; {audit.confidence:.4g} counts the bounds of all "
            f"{audit.looks} times."
        )
    if not isinstance(plan, AuditPlan):
        raise TypeError("findings: must all be from trials, or all from scores")
    how, most = (
        "Half of the trials choose the attacker's threshold; the other half, as counted, give the bound.",
        f" With as many trials, a perfect attack would have shown {result.ceiling:.2f}.",
    )
    if plan.estimator is Estimator.DRAWN_NOISE:
        how = "What a trial shows without noise is known, so the noise that was drawn gives the bound."
        most = ""
    trials = (
        f"{audit.game}. {audit.trials:,} independent trials, half of them in each of two worlds: {plan.pair}. The "
        f"attacker {plan.threat_model}."
        if audit.game
        else f"{audit.trials} times, the run's own trainer made one step from step {audit.steps} of the run. A coin "
        f"toss chose one of two worlds: {plan.pair}. The attacker {plan.threat_model}, and guesses the outcome."
    )
    return (
        f"Game: {trials} {how} Each row states a lower bound on epsilon at delta {plan.delta:g} with confidence "
        f"{plan.confidence:g} ({plan.estimator.value}), 0.95 for all rows of the run together.{most}"
    )


def _adversaries(audit: Audit) -> list[str]:
    on_run = audit.of(Role.RUN)
    return [f"Adversary {one.attack!r} {one.adversary}." for one in on_run] if audit.scores() else []


def _result(audit: Audit) -> str:
    best, result = audit.strongest, audit.strongest.result
    if not isinstance(result, AuditResult):
        return _refutation(audit)
    if result.epsilon_lower == 0:
        return "Found: nothing. A better attack may exist; an audit never proves privacy."
    run = audit.played is Played.PROTECTION
    what, member, other, whose = (
        ("the protected value", "trials of the first world", "of the second for the first", "the run")
        if run
        else ("membership", "members", "others for members", "a single step")
    )
    if best.claim is not None and not best.refutes:
        what = "no more than is proven"
    return (
        f"Found: {what}. The {best.attack} attack missed {result.false_negatives} of {result.n_in} {member} and took "
        f"{result.false_positives} of {result.n_out} {other}, so {whose} costs at least epsilon "
        f"{result.epsilon_lower:.2f}."
    )


def _refutation(audit: Audit) -> str:
    """Return in a sentence whether the claim is refuted by scores, and by what; empty for trials."""
    if not audit.scores():
        return ""
    epsilon = next(iter(audit.scores().values())).plan.claimed
    if epsilon is None:
        return "No finite epsilon is claimed, so there is nothing to refute."
    found = []
    for attack, result in audit.scores().items():
        for bound in result.refuting:
            # a bound at most the claim's own epsilon is above the claim at another delta
            strictest, shown = result.at_strictest(bound), f"{bound.epsilon:.2f}"
            if strictest is not None and bound.epsilon <= epsilon:
                shown = f"{strictest[2]:.2f} at delta {strictest[0]:g}, where {strictest[1]:.2f} is claimed"
            found.append(f"{attack!r} by {bound.method.value}: at least {shown}")
    if found:
        return f"The claimed epsilon {number(epsilon)} is REFUTED ({'; '.join(found)})."
    return f"The claimed epsilon {number(epsilon)} is not refuted, which does not prove it."


def _statements(audit: Audit) -> list[str]:
    best = audit.strongest
    result, claim = best.result, best.claim
    if not isinstance(result, AuditResult):
        held = [one.at_strictest(bound) for one in audit.scores().values() for bound in one.bounds]
        return [
            f"Normal scores are held against the claim at delta {delta:g} (epsilon {claimed:.2f}), where it is "
            "strictest: sampled steps cost less at large deltas than the Gaussian mechanism with the same epsilon does."
            for delta, claimed, _ in [one for one in held if one is not None][:1]
        ]
    texts = []
    if claim is not None and audit.game:
        says = (
            "It is REFUTED: the mechanism does not do what the theorem assumes."
            if best.refutes
            else f"The bound reaches {result.epsilon_lower / claim.epsilon:.2f} of it and does not contradict it."
        )
        texts.append(f"The run's {claim.status.value} epsilon is {number(claim.epsilon)}. {says}")
    elif claim is not None:
        says = (
            "It is REFUTED: the step does not do what the theorem assumes. The guarantee of the run rests on that "
            "step, so it does not hold either."
            if best.refutes
            else "The bound stays below it. The guarantee of the run rests on that step and on secret batches, which "
            "this game does not keep secret; it is not contradicted."
        )
        texts.append(
            "The theorem for one step, against an attacker who knows which step the record may take part in, gives "
            f"epsilon {number(claim.epsilon)}. {says}"
        )
    return texts + [_statement(result, one) for one in audit.guarantees if not one.is_proven]


def _statement(result: AuditResult, guarantee: Guarantee) -> str:
    """Say what the bound means for an unproven statement about the run."""
    name = f"The statement {guarantee.status.value!r}"
    if math.isinf(guarantee.epsilon):
        text = f"{name} gives no finite epsilon, so there is nothing to refute."
    else:
        text = f"{name}: epsilon {number(guarantee.epsilon)} {_verdict(result, guarantee)}."
    value = guarantee.formula_value
    if guarantee.status is not Status.CLAIMED or value is None:
        return text
    reason = "the formula is infinite" if math.isinf(value) else None
    says = _verdict(result, replace(guarantee, epsilon=value, reason=reason))
    return f"{text} The paper's formula, if its hypotheses held, gives {number(value)} for the whole run: {says}."


def _verdict(result: AuditResult, guarantee: Guarantee) -> str:
    if result.verdict(guarantee) is Verdict.REFUTED:
        return "is REFUTED, since a single step already costs more"
    if guarantee.epsilon > result.ceiling:
        return (
            f"exceeds what so many trials can show ({result.ceiling:.2f}), so the audit neither refutes nor "
            "supports it"
        )
    return "is not contradicted"


def _powers(audit: Audit) -> float | None:
    """Return the power of the strongest attack, or the largest of all scores; None if not known."""
    found = audit.of(Role.RUN) if audit.scores() else [audit.strongest]
    return max((one.power for one in found if one.power is not None), default=None)


def _weakness(audit: Audit) -> str:
    """Return a sentence about an audit that would probably miss half of the noise; empty if it would not."""
    power = _powers(audit)
    if power is None or power >= _WEAK:
        return ""
    training = " and, for most trainers, an audit of one training" if audit.strongest.scope == "step" else ""
    return (
        f"This audit is weak: it would find half of the noise missing with probability {power:.2f}; more "
        f"{audit.played.counted}{training} find smaller faults."
    )


def _power(audit: Audit) -> str:
    power = _powers(audit)
    if power is None:
        return ""
    text = (
        "Power: if the mechanism had half of its noise, the best attack that its theorem then allows would refute the "
        f"claim with probability {power:.2f} in as many {audit.played.counted}"
    )
    normal = " (by normal scores only if they pass the test of normality then)" if audit.scores() else ""
    return f"{text}{normal}. {_weakness(audit)}".rstrip()


_COINS = (
    "in the null control the same scores are read with coins that no training followed, and all bounds must be 0 (by "
    "chance, one audit in twenty has one above it)."
)
_CONTROLS = {
    Played.STEP: "in the null control, the attacker is asked about records that were in no batch, and must find "
    "nothing (by chance, one such bound in twenty exceeds 0). In the protected control, the run's records are "
    "protected by known noise, and no bound may exceed the theorem. In the broken control that noise is left out, and "
    "an attack must find it.",
    Played.PROTECTION: "in the null control both worlds are the first one, and nothing must be found (by chance, one "
    "such bound in twenty exceeds 0). In the broken control the same code runs with a quarter of the noise or four "
    "times the epsilon, and the attack must find it.",
    Played.TRAINING: f"{_COINS} In the broken control half of the noise is taken away from the same readings, which "
    "the auditor, who knows the coins and the batches, can tell from the canaries, and it must be found.",
    Played.FINAL_MODELS: _COINS,
}


def _controls(audit: Audit) -> str:
    if all(finding.role is Role.RUN for finding in audit.findings):  # as older versions kept it
        return ""
    text = f"Controls: {_CONTROLS[audit.played]}"
    failed = sorted({finding.role.value for finding in audit.failed_controls})
    if not failed:
        return f"{text} All controls behaved as required."
    return (
        f"{text} These controls did NOT behave as required: {', '.join(failed)}. Repeat the audit with more "
        f"{audit.played.counted} and another seed before you rely on it."
    )


def perfect_guesses(result: OneRunResult) -> str:
    """Return the largest epsilon that as many scores could have shown by guesses, one for each way to read them."""
    plan = result.plan
    shown = []
    for bound in result.bounds:
        if bound.method.guesses:
            every = guesses_bound(
                bound.method,
                plan.canaries,
                bound.guesses,
                bound.guesses,
                delta=plan.delta,
                confidence=plan.confidence,
            )
            shown.append(f"epsilon {every:.2f} by {bound.method.value}")
    return "; ".join(shown)
