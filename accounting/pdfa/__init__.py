"""What the paper on photonic direct feedback alignment claims."""
