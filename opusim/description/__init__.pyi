from .schema import load_description as load_description
from .schema import DeviceDescription as DeviceDescription
