from .schema import DeviceDescription as DeviceDescription
from .schema import load_description as load_description
