"""The checklist of `qnmixer.doctor`."""
