"""What a run writes: its folder, results.json, and its loggers."""
