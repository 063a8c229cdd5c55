"""What temperature does to a device: dark current and noise."""
