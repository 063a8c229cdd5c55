"""How private was a training run: what a paper claims, what is proven, and what an audit found."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
