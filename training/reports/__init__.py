"""Reports and figures of runs and sweeps."""
