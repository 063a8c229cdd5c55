"""Which devices come with opusim? One TOML description each, read by `opusim.description.loading`."""
