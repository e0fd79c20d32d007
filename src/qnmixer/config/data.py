"""The `data=…` part of the configuration: one dataclass a source, all with the same common fields. No torch here."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qnmixer.config.custom import Custom
from qnmixer.config.option import number, one_of
from qnmixer.errors import ConfigError, DataError
from qnmixer.files import check_there


@dataclass(kw_only=True)
class DataConfig:
    """What every source has.

    Attributes:
        name: which source this is.
        image_size: rows and columns that slices are resampled to, S.
        batch_size: slices per device and step.
        num_workers: processes that load slices; 0 loads in the main process.
        prefetch_factor: batches that each worker holds ready.
        pin_memory: page-locked host memory for faster copies to a GPU; null decides by whether there is one.
        scaling: "attenuation" (the same for every slice) or "minmax" (per slice, as in the paper).
        hu_max: HU that attenuation scaling maps to 1; −1000 maps to 0.
        augment: random flips and quarter turns of training slices.
        simulation_factor: sinograms come from the slice on a grid that is so many times finer, so that nothing is
            gained from simulating and reconstructing with one matrix; 1: from the slice itself, as in the field.
            Phantoms have up to 2; files with fewer pixels than image_size · simulation_factor are upsampled.
        disc: paste a bright disc into every slice, the paper's test out of distribution.
        train_slices: train on so many different slices only, spread over those there are (of phantoms, over n_train,
            which then are the same in every epoch).
        seed: of phantoms, splits, order and augmentation.
    """

    name: str = ""
    image_size: int = number(at_least=8, default=256)
    batch_size: int = number(at_least=1, default=1)
    num_workers: int = number(at_least=0, default=2)
    prefetch_factor: int = number(at_least=1, default=2)
    pin_memory: bool | None = None
    scaling: str = one_of("attenuation", "minmax", default="attenuation")
    hu_max: float = number(above=-1000, default=2000.0)
    augment: bool = False
    simulation_factor: int = number(at_least=1, default=1)
    disc: bool = False
    train_slices: int | None = number(at_least=1, default=None)
    seed: int = number(at_least=0, default=1)


@dataclass(kw_only=True)
class PhantomData(DataConfig):
    """Random phantoms: no files needed.

    Attributes:
        n_train: slices that count as one epoch; every epoch brings new ones.
        n_val: validation phantoms, always the same.
        n_test: test phantoms, always the same.
        anatomy_share: part of the phantoms that resemble a body; the rest are ellipses.
    """

    name: str = "phantoms"
    simulation_factor: int = number(at_least=1, at_most=2, default=1)  # they are painted at twice the image size
    n_train: int = number(at_least=1, default=1000)
    n_val: int = number(at_least=1, default=32)
    n_test: int = number(at_least=1, default=64)
    anatomy_share: float = number(at_least=0, at_most=1, default=0.85)


@dataclass(kw_only=True)
class FolderData(DataConfig):
    """What every source of files has.

    Attributes:
        root: folder that is searched to any depth.
        include: only files whose path below root matches this pattern, such as "*/full_3mm/*".
        patient_from: "tag" (the folder where the tag is empty) or "folder", which tells patients of one file
            format apart.
        split: "random" (by patient), "aapm" (by the challenge's names), "explicit" (the three lists below),
            "slices" (blocks of every series: leaks anatomy between the parts) or "all" (everything is test).
        val_fraction: part of the patients for validation (random), or of each series (slices).
        test_fraction: the same for test.
        train_patients: for split=explicit; empty takes everybody else.
        val_patients: for split=explicit.
        test_patients: for split=explicit.
        cache_dir: where decoded slices are kept; null takes $XDG_CACHE_HOME/qnmixer or ~/.cache/qnmixer.
    """

    root: str | None = None
    include: str = "*"
    patient_from: str = one_of("tag", "folder", default="tag")
    split: str = one_of("random", "aapm", "explicit", "slices", "all", default="random")
    val_fraction: float = number(above=0, at_most=1, default=0.1)
    test_fraction: float = number(above=0, at_most=1, default=0.1)
    train_patients: list[str] = field(default_factory=list)
    val_patients: list[str] = field(default_factory=list)
    test_patients: list[str] = field(default_factory=list)
    cache_dir: str | None = None


@dataclass(kw_only=True)
class DicomData(FolderData):
    """Folders of CT in DICOM, told by content: any nesting, any file name, single or multi-frame."""

    name: str = "dicom"


@dataclass(kw_only=True)
class DeepLesionData(FolderData):
    """DeepLesion's 16-bit PNG: HU = pixel − 32768, folders named patient_study_series."""

    name: str = "deeplesion"


@dataclass(kw_only=True)
class NumpyData(FolderData):
    """`.npy` files in HU: single slices [H, W] or stacks [N, H, W]; a patient is a subfolder, or else a file."""

    name: str = "numpy"


@dataclass(kw_only=True)
class CustomData(DataConfig, Custom):
    """Slices of a user's own class, built with `(part, **arguments)` as `qnmixer.data.custom.CustomSource` does it."""

    name: str = "custom"


@dataclass(kw_only=True)
class MixedData(DataConfig):
    """Several sources, each with its share of the training samples and its own split.

    Attributes:
        evaluate_on: the source that validation and test slices are of; None: those of all together.
        sources: by name: share, the source's name in the group (numpy, say), and what that has beside the common keys.
            An epoch has each training slice of the first source with a share once.
    """

    name: str = "mixed"
    evaluate_on: str | None = None
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """Part of the training samples that is of each source, by its name."""
        return {name: source["share"] for name, source in self.sources.items()}


@dataclass(kw_only=True)
class AsTrained:
    """For an evaluation: the run's own slices, but for what is not None here."""

    name: str
    simulation_factor: int | None = number(at_least=1)
    disc: bool | None


def check_data(config: DataConfig) -> None:
    """Raise DataError for a folder that is not there, before anything is loaded to look into it.

    Raises ConfigError for two sources of a mix that have a folder in common: one's training slices test the other.
    """
    if isinstance(config, FolderData) and config.root is not None:
        _check_root("data.root", config.root)
    if isinstance(config, MixedData):
        seen: dict[str, Path] = {}
        for name, source in config.sources.items():
            if (root := source.get("root")) is not None:
                _check_root(f"data.sources.{name}.root", root)
                folder = Path(root).expanduser().resolve()
                for other, its in seen.items():
                    if folder.is_relative_to(its) or its.is_relative_to(folder):
                        raise ConfigError(
                            f"data.sources.{name}.root={root} has slices of data.sources.{other} too, which each would "
                            "split for itself: give each source a folder of its own"
                        )
                seen[name] = folder


def _check_root(key: str, root: str) -> None:
    check_there(key, root, "the folder that holds the slices")
    if Path(root).expanduser().is_file():
        raise DataError(f"{key}={root} is a file; give the folder that holds it")
