"""What do frames alone say of a device? Photon transfer, noise of readings, certificates."""
