"""The file formats of slices. Each is declared by its reader, for `data=` and for `reconstruct input=`."""

from pathlib import Path

from qnmixer.data.deeplesion import DeepLesionReader
from qnmixer.data.dicom import DicomReader
from qnmixer.data.numpy_files import NumpyReader
from qnmixer.data.slices import OpenFile, reading

# DICOM is the last: a file of it may begin with any bytes.
FORMATS: tuple[NumpyReader | DeepLesionReader | DicomReader, ...] = NumpyReader(), DeepLesionReader(), DicomReader()
"""Each has `magic`, the first bytes of its files, `endings` of their names, and `open`."""


def open_file(path: Path) -> OpenFile:
    """Open a file of any format, which its first bytes show. Raises SkipFile if it has no slices."""
    with reading("unreadable"), path.open("rb") as stream:
        start = stream.read(8)
    return next(form for form in FORMATS if start.startswith(form.magic)).open(path)
