"""HTML reports and figures of runs and sweeps."""
