"""Sweeps: their folders, their jobs, and their final reports. No torch import."""
