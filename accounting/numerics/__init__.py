"""RDP and PLD accountants and closed forms on plain numbers; scipy and dp_accounting are imported only here.

Both libraries take half a second to import. The names below are therefore loaded when they are first used, by
`numerics.gaussian_bounds(...)`, so that describing a mechanism or printing help imports neither.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
