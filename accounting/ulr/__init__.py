"""The unified likelihood ratio method: what its paper claims, and what is proven."""
