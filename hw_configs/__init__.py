"""Device descriptions that come with opusim: one TOML file each, read by `opusim.description.schema`."""
