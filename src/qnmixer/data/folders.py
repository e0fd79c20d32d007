"""The folders of a config's slices, checked before their files are searched. No torch import."""

from pathlib import Path

from qnmixer.errors import ConfigError, DataError
from qnmixer.files import check_there, path_of
from qnmixer.settings.data import DataConfig, FolderData, PairData
from qnmixer.settings.validation import has_no_value


def check_data(config: DataConfig) -> None:
    """Raise DataError for a folder that does not exist, before its files are searched.

    Raises ConfigError if two sources of a mix share a folder: training slices of one would test the other.
    """
    seen: dict[str, Path] = {}
    for section, source in config.by_section().items():
        if not isinstance(source, FolderData | PairData):
            continue
        if source.root is None:
            raise has_no_value(f"{section}.root")
        check_there(f"{section}.root", source.root, "the folder with the slices")
        if path_of(source.root).is_file():
            raise DataError(f"{section}.root={source.root} is a file: give its folder")
        if isinstance(source, PairData):
            continue
        folder = path_of(source.root).resolve()
        for other_section, other_folder in seen.items():
            if folder.is_relative_to(other_folder) or other_folder.is_relative_to(folder):
                raise ConfigError(
                    f"{section}.root={source.root} has slices of {other_section} too, which splits them anew"
                )
        seen[section] = folder
        check_no_nifti(f"{section}.root", source.root)


def check_no_nifti(key: str, path: str) -> None:
    """Raise DataError for a NIfTI file, or for a folder that contains only NIfTI files, before anything is loaded."""
    place, name = path_of(path), ""
    # A generator, so that a folder with other files costs a look at one file only.
    for name in [place.name] if place.is_file() else (file.name for file in place.rglob("*") if file.is_file()):
        if not name.lower().endswith((".nii", ".nii.gz")):
            return
    if name:
        raise DataError(
            f"{key}={path} is NIfTI, which qnmixer cannot read: give its original DICOM files, or convert it to "
            f".npy in HU: numpy.save('ct.npy', nibabel.load('{name}').get_fdata(dtype='float32').T)"
        )
