"""DICOM files in encodings that pydicom cannot write itself."""

from pathlib import Path

import gdcm  # type: ignore[import-untyped]  # a SWIG module without stubs


def compressed(source: Path, path: Path, syntax: str = "JPEG2000Lossless") -> Path:
    """Write a DICOM file again, in a transfer syntax by gdcm's name; `path` may be that of the source."""
    reader, change, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
    reader.SetFileName(str(source))
    assert reader.Read()
    change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, syntax)))
    change.SetInput(reader.GetImage())
    assert change.Change()
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    writer.SetFileName(str(path))
    assert writer.Write()
    return path
