"""The mechanisms of opusim, one subject a file; what every mechanism shares is imported from here."""

from accounting.mechanism import (
    CertifiedMechanism,
    Mechanism,
    counted,
    described,
    mechanism_class,
    mechanism_classes,
    mechanism_from_json,
    mechanism_kinds,
    no_guarantee,
    proven_status,
    spend_certificates,
)
from accounting.parameters import (
    Count,
    DeviceNoise,
    ExactlyRounded,
    NonNegative,
    Positive,
    SamplingProbability,
    parameters_of,
)

__all__ = [
    "CertifiedMechanism",
    "Count",
    "DeviceNoise",
    "ExactlyRounded",
    "Mechanism",
    "NonNegative",
    "Positive",
    "SamplingProbability",
    "counted",
    "described",
    "mechanism_class",
    "mechanism_classes",
    "mechanism_from_json",
    "mechanism_kinds",
    "no_guarantee",
    "parameters_of",
    "proven_status",
    "spend_certificates",
]
