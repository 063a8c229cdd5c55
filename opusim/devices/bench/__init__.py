"""A bench of one's own: a mirror array and a camera behind two small protocols, read as a noisy device."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
