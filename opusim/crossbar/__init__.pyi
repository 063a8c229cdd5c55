from .conversion import DeviceModel as DeviceModel
from .conversion import convert as convert
from .layers import DeviceConv2d as DeviceConv2d
from .layers import DeviceLinear as DeviceLinear
from .programmable import Converter as Converter
from .programmable import ProgrammableDevice as ProgrammableDevice
