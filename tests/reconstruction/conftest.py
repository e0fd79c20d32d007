"""DICOM files that the tests write themselves, as in the tests of data."""

from ..data.conftest import body_hu, make_ct

__all__ = ["body_hu", "make_ct"]
