"""The convex approximation of two-layer ReLU networks, trained by noisy gradient descent."""
