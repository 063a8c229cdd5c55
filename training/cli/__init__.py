"""The `opusim` command: every layer's commands under one name."""

from training.cli.app import main as main
