"""New slices or measured sinograms through a trained network, from files to files."""
