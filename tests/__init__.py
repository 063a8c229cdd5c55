"""Tests, in folders that mirror the product; shared helpers in `support`, independent references in `oracles`."""
