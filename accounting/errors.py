"""Errors of accounting that a caller may want to catch."""

from __future__ import annotations

from opusim.errors import OpusimError


class BudgetExceeded(OpusimError):
    """The next step would spend more than the budget; it was not taken."""


class NoGuarantee(OpusimError, ValueError):
    """No theorem covers what was asked; the message names what is missing and what would be covered."""


class LedgerCorrupt(OpusimError, ValueError):
    """A ledger was changed, cut or reordered; the message names file and line."""
