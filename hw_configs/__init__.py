"""Device descriptions that come with opusim: one TOML file each, read by `opusim.description.schema`."""

if __name__ == "hw_configs":
    raise ImportError("this folder is imported as opusim.hw_configs; write `from opusim import hw_configs`")
