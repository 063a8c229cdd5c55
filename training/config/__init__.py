"""Every option of a run as one frozen, validated configuration (TOML file, `--set`, or a mapping)."""

from training.config.run import RunConfig as RunConfig
from training.config.run import load_config as load_config
