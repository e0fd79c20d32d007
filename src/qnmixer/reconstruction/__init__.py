"""Trained networks: their weights, their scan, and the images that they give of new slices and sinograms."""
