"""Tests for every device, to be inherited by other packages, and faults to inject into devices.

`contract.DeviceContract` needs pytest; `faults` needs nothing.
"""
