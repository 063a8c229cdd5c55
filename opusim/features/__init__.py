"""Optical random features, |R x|^2 of binary codes: encoders, maps for scikit-learn and torch, and their kernel."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
