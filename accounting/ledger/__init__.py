"""The ledger of a run: what it has paid for, on disk before it is computed."""
