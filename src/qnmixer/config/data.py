"""What `data` may say: the keys of each source of slices, their bounds, and the rules between them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from qnmixer.config.option import number, one_of
from qnmixer.config.target import Target, schema
from qnmixer.errors import ConfigError, DataError
from qnmixer.files import check_there

if TYPE_CHECKING:
    from qnmixer.config.run import Config


@schema()
@dataclass(kw_only=True)
class DataConfig(Target):
    """What every source has. A class of slices is built with `(part, **arguments)`, see `qnmixer.data.sources`.

    Attributes:
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

    group: ClassVar[str] = "data"

    image_size: int = number(at_least=8)
    batch_size: int = number(at_least=1)
    num_workers: int = number(at_least=0)
    prefetch_factor: int = number(at_least=1)
    pin_memory: bool | None
    scaling: str = one_of("attenuation", "minmax")
    hu_max: float = number(above=-1000)
    augment: bool
    simulation_factor: int = number(at_least=1)
    disc: bool
    train_slices: int | None = number(at_least=1)
    seed: int = number(at_least=0)

    def keywords(self) -> dict[str, Any]:
        """The arguments that only the source knows."""
        return self.arguments

    def without_places(self) -> Self:
        """The same, without what is the machine's, the people's or the patients'."""
        return replace(self, arguments={})


@schema("qnmixer.data.phantoms.PhantomSource")
@dataclass(kw_only=True)
class PhantomData(DataConfig):
    """Random phantoms: no files needed.

    Attributes:
        n_train: slices that count as one epoch; every epoch brings new ones.
        n_val: validation phantoms, always the same.
        n_test: test phantoms, always the same.
        anatomy_share: part of the phantoms that resemble a body; the rest are ellipses.
    """

    simulation_factor: int = number(at_least=1, at_most=2)  # they are painted at twice the image size
    n_train: int = number(at_least=1)
    n_val: int = number(at_least=1)
    n_test: int = number(at_least=1)
    anatomy_share: float = number(at_least=0, at_most=1)

    def keywords(self) -> dict[str, Any]:
        """What phantoms are drawn by."""
        return {key: getattr(self, key) for key in ("n_train", "n_val", "n_test", "anatomy_share", "seed")}


@schema()
@schema(
    "qnmixer.data.deeplesion.DeepLesionReader",
    "qnmixer.data.dicom.DicomReader",
    "qnmixer.data.numpy_files.NumpyReader",
)
@dataclass(kw_only=True)
class FolderData(DataConfig):
    """What every source of files has. Its reader is built with `(**arguments)`.

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

    root: str | None
    include: str
    patient_from: str = one_of("tag", "folder")
    split: str = one_of("random", "aapm", "explicit", "slices", "all")
    val_fraction: float = number(above=0, below=1)
    test_fraction: float = number(above=0, below=1)
    train_patients: list[str]
    val_patients: list[str]
    test_patients: list[str]
    cache_dir: str | None

    def without_places(self) -> Self:
        """Without folders and patients too."""
        return replace(
            super().without_places(),
            root=None, include="*", cache_dir=None, train_patients=[], val_patients=[], test_patients=[],
        )  # fmt: skip

    def check(self, run: "Config") -> None:
        """The parts of a split."""
        if self.split != "explicit" and (self.train_patients or self.val_patients or self.test_patients):
            raise ConfigError(f"lists of patients are used only with data.split=explicit, not data.split={self.split}")
        if self.val_fraction + self.test_fraction >= 1:
            raise ConfigError(
                "data.val_fraction and data.test_fraction leave nothing to train on; their sum must be below 1"
            )


@dataclass(kw_only=True)
class AsTrained:
    """For an evaluation: the run's own slices, but for what is not None here."""

    _target_: str | None
    simulation_factor: int | None = number(at_least=1)
    disc: bool | None


def check_data(config: DataConfig) -> None:
    """Raise DataError for a folder that is not there, before anything is loaded to look into it."""
    if isinstance(config, FolderData) and config.root is not None:
        check_there("data.root", config.root, "the folder that holds the slices")
        if Path(config.root).expanduser().is_file():
            raise DataError(f"data.root={config.root} is a file; give the folder that holds it")
