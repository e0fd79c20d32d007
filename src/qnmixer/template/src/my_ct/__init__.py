"""Sparse-view CT: a network, its training, and its data."""
