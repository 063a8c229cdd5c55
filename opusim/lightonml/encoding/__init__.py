"""lightonml's encoders and decoders, over those of `opusim.features`."""
