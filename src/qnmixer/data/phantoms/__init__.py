"""Random slices of bodies and of ellipses, drawn without files."""
