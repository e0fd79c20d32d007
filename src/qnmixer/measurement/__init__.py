"""The measurement: a scan, its noise, and what builds them from a config. Training and trained networks share it."""
