"""Sweeps: their folders, their jobs, and what is said when they end. No torch import."""
