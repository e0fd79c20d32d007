"""Schema of `data`: the keys of each source of slices, their bounds, and the rules between them.

Keys that only one class has are arguments of that class: its signature has their types and bounds.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Lt

from qnmixer.engine.config.groups import Group, parse_section
from qnmixer.engine.config.options import (
    TARGET,
    converted,
    has_no_value,
    keys_of,
    options,
    unknown_key,
    values_of_option,
)
from qnmixer.engine.plugins import Kind
from qnmixer.errors import ConfigError, DataError
from qnmixer.files import check_no_nifti, check_there, path_of

if TYPE_CHECKING:
    from qnmixer.engine.config.run import Config

LOADING = "batch_size", "num_workers", "prefetch_factor", "pin_memory", "cache_dir"
"""Keys of how slices are loaded. They change no slice."""
_PRIVATE: dict[str, Any] = {
    "root": None, "include": "*", "cache_dir": None,
    "train_patients": [], "val_patients": [], "test_patients": [],
}  # fmt: skip
"""Keys that name folders or patients, and what is shared instead."""


@dataclass(kw_only=True)
class DataConfig(Group):
    """The keys of every source. `qnmixer.engine.data.sources` builds a class of slices with `(part, **arguments)`.

    conf/data/_common.yaml says what each key is. Simulation and reconstruction use different matrices with a
    simulation_factor above 1, which keeps scores honest. Files with too few pixels for it are upsampled.
    """

    group: ClassVar[str] = "data"
    kind: ClassVar[Kind] = Kind(
        "a class with __len__ and load",
        lambda it: isinstance(it, type) and hasattr(it, "__len__") and hasattr(it, "load"),
    )
    n_ours: ClassVar[int] = 1
    offered: ClassVar[tuple[str, ...]] = ("image_size", "fine", "geometry", "hu_max", "seed")
    late: ClassVar[bool] = True
    own_range: ClassVar[bool] = False
    """Whether PSNR and SSIM take each reference's own range, as skimage does, instead of 1."""
    measured: ClassVar[bool] = False
    """Whether its sinograms were measured by a scanner."""
    attenuation_of_one: ClassVar[float | None] = None
    """Attenuation in 1/mm that x = 1 means; None: that of hu_max, which depends on the attenuation of water."""

    image_size: Annotated[int, Ge(8), Le(8192)]
    batch_size: Annotated[int, Ge(1), Le(2**20)]
    num_workers: Annotated[int, Ge(0), Le(1024)]
    prefetch_factor: Annotated[int, Ge(1), Le(1024)]
    pin_memory: bool | None
    scaling: Literal["attenuation", "minmax"]
    hu_max: Annotated[float, Gt(-1000)]
    augment: bool
    simulation_factor: Annotated[int, Ge(1), Le(16)]
    disc: bool
    train_slices: Annotated[int, Ge(1), Le(10**9)] | None
    seed: Annotated[int, Ge(0), Le(2**32 - 1)]

    @classmethod
    def schema_of(cls, value: Any) -> type["DataConfig"]:
        """The schema of a source with this target. A user's own reader of files has the keys of ours, such as root."""
        super().schema_of(value)
        if not isinstance(value, Mapping):
            return cls
        target = value[TARGET]
        for schema in (PhantomData, MixedData):
            if target == schema.target:
                return schema
        if target.startswith("qnmixer.extras."):
            return PairData
        needed = {f.name for f in fields(FolderData) if f.default is MISSING and f.default_factory is MISSING}
        return FolderData if target.startswith("qnmixer.engine.data.") or needed <= value.keys() else cls

    @property
    def hu_scaling(self) -> tuple[float, float]:
        """(offset, scale) of HU = offset + scale · x with scaling=attenuation, the same for every slice."""
        return -1000.0, self.hu_max + 1000.0

    @property
    def at_true_size(self) -> bool:
        """Whether a source resamples its slices at the size that their files give."""
        return any(isinstance(it, FolderData) and it.pixel_size == "header" for it in self.by_section().values())

    def by_section(self) -> dict[str, "DataConfig"]:
        """The sources of the slices, by config section: this source itself, or each source of a mix."""
        return {"data": self}

    def without_places(self) -> Self:
        """The same config without private values: folders, people, patients, and arguments of the user's own class."""
        ours = self.arguments if self._target_.startswith("qnmixer.") else {}
        keys = {f.name: _PRIVATE[f.name] for f in fields(self) if f.name in _PRIVATE}
        return replace(self, arguments={key: _PRIVATE.get(key, value) for key, value in ours.items()}, **keys)


@dataclass(kw_only=True)
class PhantomData(DataConfig):
    """Random phantoms: no files needed. `PhantomSource` has their keys."""

    target: ClassVar[str] = "qnmixer.engine.data.phantoms.PhantomSource"
    late: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.simulation_factor > 2:  # they are painted at twice the image size
            factor = self.simulation_factor
            raise ConfigError(f"data.simulation_factor={factor} is too large: give 2 or less ({self.section})")


@dataclass(kw_only=True)
class FolderData(DataConfig):
    """The keys of every source of files. Its reader is built with `(**arguments)`.

    conf/data/_folder.yaml says what each key is. train_patients may be empty: all patients who are in no other list.
    """

    kind: ClassVar[Kind] = Kind(
        "a class with kind, wanted and read, which data=custom does not need",
        lambda it: isinstance(it, type) and all(hasattr(it, name) for name in ("kind", "wanted", "read")),
    )
    n_ours: ClassVar[int] = 0
    offered: ClassVar[tuple[str, ...]] = ()

    root: str | None
    include: str
    patient_from: Literal["tag", "folder"]
    split: Literal["random", "explicit", "all"]
    val_fraction: Annotated[float, Gt(0), Lt(1)]
    test_fraction: Annotated[float, Gt(0), Lt(1)]
    train_patients: list[str]
    val_patients: list[str]
    test_patients: list[str]
    cache_dir: str | None
    pixel_size: Literal["field_of_view", "header"] = "field_of_view"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split != "explicit" and (self.train_patients or self.val_patients or self.test_patients):
            key = f"{self.section}.split"
            raise ConfigError(f"lists of patients are used only with {key}=explicit, not {key}={self.split}")
        if self.val_fraction + self.test_fraction >= 1:
            raise ConfigError(f"{self.section}.val_fraction + test_fraction leave nothing to train on: lower them")


@dataclass(kw_only=True)
class MixedData(DataConfig):
    """Several sources, each with its share of the training samples and its own split.

    Attributes:
        evaluate_on: name of the source that gives the validation and test slices.
        sources: by name: a share, a source's target, and its keys beside the common ones. Instead of a target one may
            give an option's name (numpy, say), which brings its defaults. An epoch has each training slice of the first
            source with a share once.
    """

    target: ClassVar[str] = "qnmixer.engine.data.sources.MixedSource"

    evaluate_on: str
    sources: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arguments:
            raise unknown_key(f"data.{next(iter(self.arguments))}")
        for name, share in self.shares.items():
            converted(f"data.sources.{name}.share", share, Annotated[float, Ge(0), Le(1)])
        if abs(sum(self.shares.values()) - 1) > 1e-6:
            each = ", ".join(f"{name} {share:g}" for name, share in self.shares.items()) or "none"
            raise ConfigError(f"the shares of data.sources ({each}) must add up to 1")
        if self.evaluate_on not in self.sources:
            raise ConfigError(f"data.evaluate_on={self.evaluate_on} is no source: give one of data.sources")
        sources = self.by_section().values()
        if pairs := [it.section for it in sources if isinstance(it, PairData)]:
            raise ConfigError(f"{pairs[0]} has images and sinograms of its own: take it alone, not in data={self.name}")
        self.sources = self._written(sources)

    @property
    def shares(self) -> dict[str, Any]:
        """The share of each source in the training samples, by name."""
        return {name: source.get("share") for name, source in self.sources.items()}

    def by_section(self) -> dict[str, DataConfig]:
        """The sources by their section of the config, each as it would be alone. Raises ConfigError."""
        return {f"data.sources.{name}": self._source(f"data.sources.{name}", its) for name, its in self.sources.items()}

    def _common(self) -> dict[str, Any]:
        """The keys that all sources share."""
        ours = {f.name for f in fields(DataConfig)} - {TARGET, "arguments", "section"}
        return {key: getattr(self, key) for key in ours}

    def _source(self, key: str, given: dict[str, Any]) -> DataConfig:
        common = self._common()
        if both := next(iter(given.keys() & common.keys()), None):
            raise ConfigError(f"{key}.{both} is the same for all sources: give it as data.{both}")
        values = {one: value for one, value in given.items() if one not in ("share", "name")}
        if TARGET not in given or "name" in given:
            known = [one for one in (*options("data"), "custom") if one != self.name]
            if (option := given.get("name")) not in known:
                raise ConfigError(f"{key}.name={option} is not known: choose {', '.join(known)}")
            values = values_of_option("data", str(option)) | values
        if missing := next((one for one, value in values.items() if value == "???"), None):
            raise has_no_value(f"{key}.{missing}")
        source: DataConfig = parse_section(key, DataConfig.schema_of(values), values | common)
        return source

    def _written(self, sources: Collection[DataConfig]) -> dict[str, dict[str, Any]]:
        """Sources in the form of the key `sources`."""
        common = self._common()
        return {
            name: {"share": share, **{key: it for key, it in keys_of(source).items() if key not in common}}
            for (name, share), source in zip(self.shares.items(), sources, strict=True)
        }

    def checked(self) -> Self:
        """With each source checked."""
        return replace(self, sources=self._written([it.checked() for it in self.by_section().values()]))

    def targets(self) -> dict[str, str]:
        """The targets of all sources too."""
        return super().targets() | {source.key: source._target_ for source in self.by_section().values()}

    def without_places(self) -> Self:
        """Also without the private values of all sources."""
        sources = self._written([source.without_places() for source in self.by_section().values()])
        return replace(super().without_places(), sources=sources)


@dataclass(kw_only=True)
class PairData(DataConfig):
    """A public set of sinograms and reference images. Its class has the other keys, and says what its numbers mean.

    Attributes:
        root: folder of the set.
    """

    late: ClassVar[bool] = False

    root: str | None

    def keywords(self) -> dict[str, Any]:
        """The arguments of the set's reader."""
        return super().keywords() | {"root": self.root}

    def checked(self) -> Self:
        """As for every target. Then the keys that change images."""
        section = super().checked()
        if section.measured:
            check_untouched(section)
        return section

    @property
    def measured(self) -> bool:  # type: ignore[override]  # an attribute of the other sources
        """Whether the sinograms of the set are used."""
        return bool(self.arguments.get("sinograms", "measured") == "measured")

    @property
    def own_range(self) -> bool:  # type: ignore[override]  # as above
        """Whether the data range of each image is its own, as in the published scores of a set."""
        return bool(getattr(self.load(), "own_range", True))

    @property
    def attenuation_of_one(self) -> float | None:  # type: ignore[override]  # as above
        """Attenuation in 1/mm of x = 1, which the set or its key `max_attenuation` fixes; None: that of hu_max."""
        its: float | None = self.settings().get("max_attenuation") or self.load().attenuation_of_one
        return its

    @property
    def hu_scaling(self) -> tuple[float, float]:
        """That of the set, if it has one."""
        found: tuple[float, float] | None = getattr(self.load(), "hu_scaling", None)
        return found or super().hu_scaling

    def check(self, run: "Config") -> None:
        """Check that the scan is the one that the sinograms were measured with, and the scale of the images."""
        its_class = self.load()
        for key, value in its_class.scan.items() if self.measured else ():
            its = getattr(run.geometry, key)
            if its != value and not (isinstance(value, float) and math.isclose(its, value, rel_tol=1e-4)):
                raise ConfigError(
                    f"geometry.{key}={its} is not that of data={self.name}, {value}: take geometry={self.name}"
                )
        for key, value in {"scaling": "attenuation", "hu_max": getattr(its_class, "hu_max", self.hu_max)}.items():
            if getattr(self, key) != value:
                raise ConfigError(f"data.{key}={getattr(self, key)} is not that of data={self.name}: give {value}")


def check_untouched(config: DataConfig) -> None:
    """Raise ConfigError for a key that changes images: measured sinograms would not follow."""
    for key, value in {"augment": False, "disc": False, "simulation_factor": 1, "scaling": "attenuation"}.items():
        if (its := getattr(config, key)) != value:
            raise ConfigError(
                f"data.{key}={its} changes images, and a measured sinogram cannot change with its image: leave it out"
            )


@dataclass(kw_only=True)
class AsTrained:
    """For an evaluation: the slices of the run itself. Keys that are not None here replace the run's."""

    _target_: str | None
    root: str | None
    simulation_factor: Annotated[int, Ge(1), Le(16)] | None
    disc: bool | None


def check_data(config: DataConfig) -> None:
    """Raise DataError for a folder that does not exist, before its files are searched.

    Raises ConfigError if two sources of a mix share a folder: training slices of one would test the other.
    """
    seen: dict[str, Path] = {}
    for section, source in config.by_section().items():
        if not isinstance(source, FolderData | PairData) or source.root is None:
            continue
        check_there(f"{section}.root", source.root, "the folder with the slices")
        if path_of(source.root).is_file():
            raise DataError(f"{section}.root={source.root} is a file: give its folder")
        if isinstance(source, PairData):
            continue
        folder = path_of(source.root).resolve()
        for other, its in seen.items():
            if folder.is_relative_to(its) or its.is_relative_to(folder):
                raise ConfigError(
                    f"{section}.root={source.root} has slices of {other} too, and each would split them differently: "
                    "give each source its own folder"
                )
        seen[section] = folder
        check_no_nifti(f"{section}.root", source.root)
