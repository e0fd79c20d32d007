"""Slices of CT: readers of files, sources, the LightningDataModule. conf/data and written files name them from here.

A name is imported when it is asked for: a config that is read or checked needs no Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qnmixer.installed import require

if TYPE_CHECKING:
    from qnmixer.engine.data.datamodule import SliceDataModule
    from qnmixer.engine.data.deeplesion import DeepLesionReader
    from qnmixer.engine.data.dicom import DicomReader
    from qnmixer.engine.data.numpy_files import NumpyReader
    from qnmixer.engine.data.phantoms import PhantomSource
    from qnmixer.engine.data.sources import MixedSource

__all__ = ["DeepLesionReader", "DicomReader", "MixedSource", "NumpyReader", "PhantomSource", "SliceDataModule"]

_MODULES = {
    "DeepLesionReader": "qnmixer.engine.data.deeplesion",
    "DicomReader": "qnmixer.engine.data.dicom",
    "MixedSource": "qnmixer.engine.data.sources",
    "NumpyReader": "qnmixer.engine.data.numpy_files",
    "PhantomSource": "qnmixer.engine.data.phantoms",
    "SliceDataModule": "qnmixer.engine.data.datamodule",
}
_OF_THE_BASE = "NumpyReader", "PhantomSource"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    if name not in _OF_THE_BASE:
        require("train", f"{__name__}.{name}")
    if name == "DicomReader":
        require("dicom", f"{__name__}.{name}")
    return getattr(import_module(_MODULES[name]), name)
