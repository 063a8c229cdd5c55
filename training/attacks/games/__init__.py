"""Two-world games on whole mechanisms: every protection of labels, and the last iterate of convex training."""
