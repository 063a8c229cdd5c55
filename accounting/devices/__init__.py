"""What a device's own readings release."""
