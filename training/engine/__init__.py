"""One run: its parts, its loop and its session."""
