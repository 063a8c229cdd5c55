"""What do programmable analog devices do? Crossbars, chips of light, and layers whose product runs on one."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
