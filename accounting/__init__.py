"""How private was a training run: what a paper claims, what is proven, and what an audit found."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accounting.calibration import calibrate as calibrate
    from accounting.composition import Budget as Budget
    from accounting.composition import guarantees as guarantees
    from accounting.convex.mechanisms import ConvexLastIterate as ConvexLastIterate
    from accounting.errors import BudgetExceeded as BudgetExceeded
    from accounting.errors import LedgerCorrupt as LedgerCorrupt
    from accounting.errors import NoGuarantee as NoGuarantee
    from accounting.guarantee import Adjacency as Adjacency
    from accounting.guarantee import Assumption as Assumption
    from accounting.guarantee import Guarantee as Guarantee
    from accounting.guarantee import Release as Release
    from accounting.guarantee import Status as Status
    from accounting.guarantee import Unit as Unit
    from accounting.labels.mechanisms import LabelAmplified as LabelAmplified
    from accounting.labels.mechanisms import LabelBudget as LabelBudget
    from accounting.labels.mechanisms import LabelOnce as LabelOnce
    from accounting.ledger.ledger import Ledger as Ledger
    from accounting.ledger.ledger import read_ledger as read_ledger
    from accounting.mechanisms import Gaussian as Gaussian
    from accounting.mechanisms import Mechanism as Mechanism
    from accounting.mechanisms import PoissonGaussian as PoissonGaussian
    from accounting.mechanisms import PoissonLaplace as PoissonLaplace
    from accounting.mechanisms import RandomizedResponse as RandomizedResponse
    from accounting.mechanisms import mechanism_from_json as mechanism_from_json
    from accounting.pdfa.mechanisms import PdfaWithoutFormula as PdfaWithoutFormula
    from accounting.pdfa.mechanisms import PublishedLayer as PublishedLayer
    from accounting.pdfa.mechanisms import PublishedPdfa as PublishedPdfa
    from accounting.records.mechanisms import RecordCentral as RecordCentral
    from accounting.records.mechanisms import Unprotected as Unprotected
    from accounting.schemes import require_scheme as require_scheme
    from accounting.selection.mechanism import PrivateSelection as PrivateSelection
    from accounting.ulr.mechanisms import PublishedUlr as PublishedUlr
    from accounting.ulr.mechanisms import RejectionGaussian as RejectionGaussian
    from accounting.zeroth_order.mechanisms import ZoGaussian as ZoGaussian
    from accounting.zeroth_order.mechanisms import ZoLaplace as ZoLaplace

# Names are imported when they are first used, so that `opusim --help` need not load scipy and dp_accounting.
_HOMES = {
    "Adjacency": "accounting.guarantee",
    "Assumption": "accounting.guarantee",
    "Budget": "accounting.composition",
    "BudgetExceeded": "accounting.errors",
    "ConvexLastIterate": "accounting.convex.mechanisms",
    "Gaussian": "accounting.mechanisms",
    "Guarantee": "accounting.guarantee",
    "LabelAmplified": "accounting.labels.mechanisms",
    "LabelBudget": "accounting.labels.mechanisms",
    "LabelOnce": "accounting.labels.mechanisms",
    "Ledger": "accounting.ledger.ledger",
    "LedgerCorrupt": "accounting.errors",
    "Mechanism": "accounting.mechanisms",
    "NoGuarantee": "accounting.errors",
    "PdfaWithoutFormula": "accounting.pdfa.mechanisms",
    "PoissonGaussian": "accounting.mechanisms",
    "PoissonLaplace": "accounting.mechanisms",
    "PrivateSelection": "accounting.selection.mechanism",
    "PublishedLayer": "accounting.pdfa.mechanisms",
    "PublishedPdfa": "accounting.pdfa.mechanisms",
    "PublishedUlr": "accounting.ulr.mechanisms",
    "RandomizedResponse": "accounting.mechanisms",
    "RecordCentral": "accounting.records.mechanisms",
    "RejectionGaussian": "accounting.ulr.mechanisms",
    "Release": "accounting.guarantee",
    "Status": "accounting.guarantee",
    "Unit": "accounting.guarantee",
    "Unprotected": "accounting.records.mechanisms",
    "ZoGaussian": "accounting.zeroth_order.mechanisms",
    "ZoLaplace": "accounting.zeroth_order.mechanisms",
    "calibrate": "accounting.calibration",
    "guarantees": "accounting.composition",
    "mechanism_from_json": "accounting.mechanisms",
    "read_ledger": "accounting.ledger.ledger",
    "require_scheme": "accounting.schemes",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'accounting' has no attribute {name!r}; it offers {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
