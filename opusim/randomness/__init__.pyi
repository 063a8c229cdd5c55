from .seeds import derive_seed as derive_seed
from .streams import NoiseStream as NoiseStream
from .streams import SeededStream as SeededStream
from .streams import SystemStream as SystemStream
from .streams import noise_stream as noise_stream
