"""The mechanisms of opusim, one subject a file; `accounting.mechanism` has what all of them share."""
