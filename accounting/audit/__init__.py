"""Answers what an attacker's scores prove about epsilon.

`two_worlds` bounds epsilon from independent scores of two worlds, `one_run` from the scores of many canaries in one
run.
"""

from opusim.accounting.one_run import (
    FEWEST_CANARIES,
    NOT_NORMAL,
    Law,
    Method,
    OneRunBound,
    OneRunPlan,
    OneRunResult,
    audit_one_run,
    ceiling,
    correct_guesses,
    guesses_bound,
)

from opusim.accounting.audit import (
    AuditPlan,
    AuditResult,
    Estimate,
    Estimator,
    Verdict,
    area_under_curve,
    audit,
    audit_drawn_noise,
    clopper_pearson_upper,
    detection_probability,
    epsilon_of,
    estimated,
    gaussian_mu,
    lower_bound,
    normal_limits,
)

__all__ = [
    "FEWEST_CANARIES",
    "NOT_NORMAL",
    "AuditPlan",
    "AuditResult",
    "Estimate",
    "Estimator",
    "Law",
    "Method",
    "OneRunBound",
    "OneRunPlan",
    "OneRunResult",
    "Verdict",
    "area_under_curve",
    "audit",
    "audit_drawn_noise",
    "audit_one_run",
    "ceiling",
    "clopper_pearson_upper",
    "correct_guesses",
    "detection_probability",
    "epsilon_of",
    "estimated",
    "gaussian_mu",
    "guesses_bound",
    "lower_bound",
    "normal_limits",
]
