"""Several processes that work on one run: who they are, what they exchange, how an error reaches all of them."""
