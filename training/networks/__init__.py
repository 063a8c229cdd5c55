"""What is trained: fully connected networks with gradients in closed form, their activations, clips and losses."""
