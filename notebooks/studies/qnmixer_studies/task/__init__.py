"""Scores of what a reader must find, on phantoms with known inserts."""
