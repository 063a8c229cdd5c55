"""How private a training run was: what a paper claims, what is proven, and what an audit found.

Names load when they are first used; `__init__.pyi` lists them.
"""

import lazy_loader

if __name__ == "accounting":
    raise ImportError("this folder is imported as opusim.accounting; write `from opusim import accounting`")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
