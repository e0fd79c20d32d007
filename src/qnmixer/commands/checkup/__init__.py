"""The checks of `qnmixer.doctor`."""
