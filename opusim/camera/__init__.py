"""A camera that looks at speckle: light, electrons, noise and digital numbers, stage by stage."""
