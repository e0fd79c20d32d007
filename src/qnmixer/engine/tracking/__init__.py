"""What a run writes and how it resumes: its folder, results.json, and its loggers."""
