"""DICOM files made on the spot, as the tests of data have them."""

from ..data.conftest import body_hu, make_ct

__all__ = ["body_hu", "make_ct"]
