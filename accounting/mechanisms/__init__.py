"""The mechanisms of opusim, one subject a file; what every mechanism shares is imported from here."""

from accounting.mechanism import CertifiedMechanism as CertifiedMechanism
from accounting.mechanism import Mechanism as Mechanism
from accounting.mechanism import Positive as Positive
from accounting.mechanism import SamplingProbability as SamplingProbability
from accounting.mechanism import counted as counted
from accounting.mechanism import mechanism_class as mechanism_class
from accounting.mechanism import mechanism_classes as mechanism_classes
from accounting.mechanism import mechanism_from_json as mechanism_from_json
from accounting.mechanism import mechanism_kinds as mechanism_kinds
from accounting.mechanism import spend_certificates as spend_certificates
