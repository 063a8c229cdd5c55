"""What a run leaves behind: its folder, checkpoints, metrics, figures and report, and the way back to a model."""
