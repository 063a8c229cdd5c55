"""What the DP-ULR paper measured."""

from __future__ import annotations

PAPER = {
    (64, 0.5): (86.12, 94.14), (64, 2.0): (78.80, 78.32), (64, 8.0): (58.65, 32.07),
    (200, 0.5): (91.98, 90.68), (200, 2.0): (87.11, 90.95), (200, 8.0): (80.05, 79.14),
    (500, 0.5): (94.19, 87.98), (500, 2.0): (90.31, 88.00), (500, 8.0): (84.53, 88.16),
}  # fmt: skip
"""Test accuracy of DP-ULR and of DP-SGD in the paper's Table 1, by batch and sigma_0."""
