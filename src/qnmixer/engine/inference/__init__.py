"""Reconstruct new slices or measured sinograms with a trained network, from files to files."""
