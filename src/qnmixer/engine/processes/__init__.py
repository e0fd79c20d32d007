"""Ranks, stop signals, cores, and one process for each device."""
