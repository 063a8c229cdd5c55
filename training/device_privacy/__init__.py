"""Privacy from a device's own noise: from noise level or temperature to epsilon, and back."""
