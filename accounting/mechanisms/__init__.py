"""The mechanisms of opusim, one subject a file; `opusim.accounting.mechanism` has what all of them share."""
