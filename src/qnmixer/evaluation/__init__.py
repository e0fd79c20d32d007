"""Scores of images, and what an evaluation writes: tables, pictures, a page."""
