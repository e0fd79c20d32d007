"""Ranks, stop signals, and one process for each device."""
