"""Does a run release what was accounted for it? A self-test of sampler, clip and noise on records of its own choice."""
