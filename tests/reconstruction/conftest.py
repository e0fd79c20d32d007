"""DICOM files that the tests write themselves, as in the tests of data, and a stand-in for a hub."""

from ..data.conftest import body_hu, make_ct
from ..hub_server import hub_server

__all__ = ["body_hu", "hub_server", "make_ct"]
