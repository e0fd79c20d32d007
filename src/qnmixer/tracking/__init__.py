"""What a run leaves behind: its folder, results.json, loggers."""
