"""A double of LightOn's closed driver: the calls that lightonml 1.4.3 makes, answered by an 8-bit camera's physics.

Written from lightonml's open side of the calls; the anchor formula is that of arXiv 2305.12988. `opu.json` is the
appliance's configuration. `LIGHTONOPU_DOUBLE_SPEED` is the factor by which frames pass faster than in real time.
"""

__version__ = "1.4.1"
