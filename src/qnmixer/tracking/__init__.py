"""A run and what it leaves: its folder, results.json, loggers."""
