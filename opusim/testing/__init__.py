"""Tests that every device must pass, to be inherited by other packages, and faults to inject into devices.

`contract.DeviceContract` needs pytest; `faults` needs nothing.
"""
