"""Models that people know, trained by backpropagation, by direct feedback alignment and through devices."""
