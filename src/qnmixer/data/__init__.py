"""Slices of CT: readers of files, sources, the LightningDataModule. conf/data and written files name them from here.

A name is imported when it is asked for: a config that is read or checked needs no Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qnmixer.installed import require

if TYPE_CHECKING:
    from qnmixer.data.datamodule import SliceDataModule as SliceDataModule
    from qnmixer.data.deeplesion import DeepLesionReader as DeepLesionReader
    from qnmixer.data.dicom import DicomReader as DicomReader
    from qnmixer.data.numpy_files import NumpyReader as NumpyReader
    from qnmixer.data.phantoms.discs import DiscSource as DiscSource
    from qnmixer.data.phantoms.phantoms import PhantomSource as PhantomSource
    from qnmixer.data.sinograms import SinogramReader as SinogramReader
    from qnmixer.data.sources import MixedSource as MixedSource

_MODULES = {
    "DeepLesionReader": "qnmixer.data.deeplesion",
    "DicomReader": "qnmixer.data.dicom",
    "DiscSource": "qnmixer.data.phantoms.discs",
    "MixedSource": "qnmixer.data.sources",
    "NumpyReader": "qnmixer.data.numpy_files",
    "PhantomSource": "qnmixer.data.phantoms.phantoms",
    "SinogramReader": "qnmixer.data.sinograms",
    "SliceDataModule": "qnmixer.data.datamodule",
}
__all__ = [*_MODULES]
_OF_THE_BASE = "NumpyReader", "PhantomSource"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    if name not in _OF_THE_BASE:
        require("train", f"{__name__}.{name}")
    if name == "DicomReader":
        require("dicom", f"{__name__}.{name}")
    return getattr(import_module(_MODULES[name]), name)
