"""What does a camera make of speckle? Light, electrons, noise and digital numbers, stage by stage."""
