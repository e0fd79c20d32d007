"""The deviation over the symmetries of a scan as an uncertainty: scaled on some patients, tested on others."""
