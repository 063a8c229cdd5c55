from .base import NoisyDevice as NoisyDevice
from .bench.device import open_bench as open_bench
from .kinds import register_device as register_device
from .registry import list_devices as list_devices
from .registry import open_device as open_device
from .registry import open_shared_device as open_shared_device
from .usage import DeviceWork as DeviceWork
from .usage import Usage as Usage
