"""How the error reaches the hidden layers: backpropagation and direct feedback alignment, digital or photonic."""
