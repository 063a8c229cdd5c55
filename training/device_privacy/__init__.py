"""The privacy that a device's own noise gives."""
