"""Your own bench: a mirror array and a camera, driven through two small protocols and read as a noisy device."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
