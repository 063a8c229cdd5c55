"""Train by backpropagation or direct feedback alignment, digital or photonic."""
