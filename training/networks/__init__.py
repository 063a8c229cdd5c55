"""Networks as a run sees them: parameters, layers whose gradients are clipped and summed, and checks of modules."""
