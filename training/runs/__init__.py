"""Run folders: what a run writes, how a later change is noticed, and how a model is read back."""
