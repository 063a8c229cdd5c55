"""Device descriptions: what a TOML file says of a device, read and checked."""
