"""How do networks learn with noisy hardware in the loop? Trainers, the engine, runs and their reports."""

import lazy_loader

if __name__ == "training":
    raise ImportError("this folder is imported as opusim.training; write `from opusim import training`")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
