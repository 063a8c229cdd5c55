"""Random numbers: counter-based generators, streams that can be rewound, streams of the operating system."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
