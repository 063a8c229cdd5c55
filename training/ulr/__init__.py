"""Train by unified likelihood ratios: forward passes with noise on one module's output at a time."""
