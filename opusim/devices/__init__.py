"""Devices: `registry` opens them by name, `kinds` finds their classes, `base` is what all of them do."""
