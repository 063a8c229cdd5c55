"""Random numbers: counter-based generators, streams that can be rewound, streams of the operating system."""
