"""Devices: `registry` opens them by name, `kinds` finds their classes, `base` is what all of them do."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
