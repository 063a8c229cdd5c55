"""Every option of a run as one frozen, validated configuration (TOML file, `--set`, or a mapping)."""

from opusim.training.config.reading import load_config as load_config
from opusim.training.config.run import RunConfig as RunConfig
