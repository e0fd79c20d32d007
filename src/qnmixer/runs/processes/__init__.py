"""Processes of a run: ranks, signals, their folders and their output."""
