"""Train any module by zeroth-order steps: forward passes on both sides of random directions, in place."""
