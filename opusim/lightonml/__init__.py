"""lightonml's names on any device of opusim: `OPU`, `OPUMap`, encoders. Programs change their import lines only.

    >>> import numpy as np
    >>> from opusim.lightonml import OPU
    >>> x = np.random.default_rng(0).integers(0, 2, size=(3, 100), dtype=np.uint8)
    >>> with OPU(n_components=50, simulated=True) as opu:
    ...     y = opu.fit_transform1d(x)
    >>> y.shape, y.context.device
    ((3, 50), 'ideal')

`docs/optical-features.md` has the table of equal calls, and what lightonml accepts silently and this module refuses.
"""

from opusim.lightonml.opu import OPU as OPU
from opusim.lightonml.opu import get_verbose_level as get_verbose_level
from opusim.lightonml.opu import set_verbose_level as set_verbose_level
