"""The mechanisms of opusim, one subject a file; what every mechanism shares is imported from here."""

from opusim.accounting.mechanism import CertifiedMechanism as CertifiedMechanism
from opusim.accounting.mechanism import Mechanism as Mechanism
from opusim.accounting.mechanism import Positive as Positive
from opusim.accounting.mechanism import SamplingProbability as SamplingProbability
from opusim.accounting.mechanism import counted as counted
from opusim.accounting.mechanism import mechanism_class as mechanism_class
from opusim.accounting.mechanism import mechanism_classes as mechanism_classes
from opusim.accounting.mechanism import mechanism_from_json as mechanism_from_json
from opusim.accounting.mechanism import mechanism_kinds as mechanism_kinds
from opusim.accounting.mechanism import spend_certificates as spend_certificates
