"""How private was a training run: what a paper claims, what is proven, and what an audit found."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accounting.budget import Budget as Budget
    from accounting.calibration import calibrate as calibrate
    from accounting.composition import guarantees as guarantees
    from accounting.convex_mechanisms import ConvexLastIterate as ConvexLastIterate
    from accounting.errors import BudgetExceeded as BudgetExceeded
    from accounting.errors import LedgerCorrupt as LedgerCorrupt
    from accounting.errors import NoGuarantee as NoGuarantee
    from accounting.guarantee import Adjacency as Adjacency
    from accounting.guarantee import Assumption as Assumption
    from accounting.guarantee import Guarantee as Guarantee
    from accounting.guarantee import Release as Release
    from accounting.guarantee import Status as Status
    from accounting.guarantee import Unit as Unit
    from accounting.label_mechanisms import LabelAmplified as LabelAmplified
    from accounting.label_mechanisms import LabelBudget as LabelBudget
    from accounting.label_mechanisms import LabelOnce as LabelOnce
    from accounting.ledger import Ledger as Ledger
    from accounting.ledger import read_ledger as read_ledger
    from accounting.mechanisms import Gaussian as Gaussian
    from accounting.mechanisms import Mechanism as Mechanism
    from accounting.mechanisms import PoissonGaussian as PoissonGaussian
    from accounting.mechanisms import PoissonLaplace as PoissonLaplace
    from accounting.mechanisms import RandomizedResponse as RandomizedResponse
    from accounting.mechanisms import mechanism_from_json as mechanism_from_json
    from accounting.pdfa_mechanisms import PdfaWithoutFormula as PdfaWithoutFormula
    from accounting.pdfa_mechanisms import PublishedLayer as PublishedLayer
    from accounting.pdfa_mechanisms import PublishedPdfa as PublishedPdfa
    from accounting.record_mechanisms import RecordCentral as RecordCentral
    from accounting.record_mechanisms import Unprotected as Unprotected
    from accounting.schemes import require_scheme as require_scheme
    from accounting.selection_mechanism import PrivateSelection as PrivateSelection
    from accounting.ulr_mechanisms import PublishedUlr as PublishedUlr
    from accounting.ulr_mechanisms import RejectionGaussian as RejectionGaussian
    from accounting.zo_mechanisms import ZoGaussian as ZoGaussian
    from accounting.zo_mechanisms import ZoLaplace as ZoLaplace

# Names are imported when they are first used, so that `opusim --help` need not load scipy and dp_accounting.
_HOMES = {
    "Adjacency": "accounting.guarantee",
    "Assumption": "accounting.guarantee",
    "Budget": "accounting.budget",
    "BudgetExceeded": "accounting.errors",
    "ConvexLastIterate": "accounting.convex_mechanisms",
    "Gaussian": "accounting.mechanisms",
    "Guarantee": "accounting.guarantee",
    "LabelAmplified": "accounting.label_mechanisms",
    "LabelBudget": "accounting.label_mechanisms",
    "LabelOnce": "accounting.label_mechanisms",
    "Ledger": "accounting.ledger",
    "LedgerCorrupt": "accounting.errors",
    "Mechanism": "accounting.mechanisms",
    "NoGuarantee": "accounting.errors",
    "PdfaWithoutFormula": "accounting.pdfa_mechanisms",
    "PoissonGaussian": "accounting.mechanisms",
    "PoissonLaplace": "accounting.mechanisms",
    "PrivateSelection": "accounting.selection_mechanism",
    "PublishedLayer": "accounting.pdfa_mechanisms",
    "PublishedPdfa": "accounting.pdfa_mechanisms",
    "PublishedUlr": "accounting.ulr_mechanisms",
    "RandomizedResponse": "accounting.mechanisms",
    "RecordCentral": "accounting.record_mechanisms",
    "RejectionGaussian": "accounting.ulr_mechanisms",
    "Release": "accounting.guarantee",
    "Status": "accounting.guarantee",
    "Unit": "accounting.guarantee",
    "Unprotected": "accounting.record_mechanisms",
    "ZoGaussian": "accounting.zo_mechanisms",
    "ZoLaplace": "accounting.zo_mechanisms",
    "calibrate": "accounting.calibration",
    "guarantees": "accounting.composition",
    "mechanism_from_json": "accounting.mechanisms",
    "read_ledger": "accounting.ledger",
    "require_scheme": "accounting.schemes",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'accounting' has no attribute {name!r}; it offers {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
