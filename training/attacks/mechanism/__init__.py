"""The self-test of a mechanism: real runs on chosen records show whether sampler, clip and noise are as accounted."""
