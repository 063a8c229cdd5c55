"""Train the convex approximation of two-layer ReLU networks by noisy gradient descent."""
