"""Calibrate a device from its frames: photon transfer, noise of readings, certificates."""
