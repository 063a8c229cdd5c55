"""Which devices are described here? One TOML file for each; `opusim.description.loading` reads them."""
