"""Does a device keep to its contract? Tests to inherit for devices of others, and faults to inject into them.

`contract.DeviceContract` needs pytest; `faults` needs nothing.
"""
