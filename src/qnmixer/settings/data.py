"""Schema of `data`: the keys of each source of slices, their bounds, and the rules between them.

Keys that only one class has are arguments of that class: its signature has their types and bounds.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import Discriminator, Field, Tag, model_validator

from qnmixer.errors import ConfigError
from qnmixer.settings.options import TARGET, options, values_of_option
from qnmixer.settings.plugins import Kind, is_trusted
from qnmixer.settings.sections import Seed
from qnmixer.settings.target import Target
from qnmixer.settings.validation import has_no_value, unknown_key, validated


class DataConfig(Target):
    """The keys of every source. `qnmixer.data.sources` builds a class of slices with `(part, **arguments)`.

    conf/data/_common.yaml says what each key is. Simulation and reconstruction use different matrices with a
    simulation_factor above 1, which keeps scores honest. Files with too few pixels for it are upsampled.
    """

    group: ClassVar[str] = "data"
    kind: ClassVar[Kind] = Kind(
        "a class with __len__ and load, or sinogram",
        lambda loaded: (
            isinstance(loaded, type)
            and hasattr(loaded, "__len__")
            and (hasattr(loaded, "load") or hasattr(loaded, "sinogram"))
        ),
    )
    n_positional: ClassVar[int] = 1
    supplied: ClassVar[tuple[str, ...]] = ("image_size", "fine", "geometry", "hu_max", "seed")
    own_range: ClassVar[bool] = False  # PSNR and SSIM take each reference's own range, as skimage does, instead of 1
    measured: ClassVar[bool] = False  # its sinograms were measured by a scanner
    read_at_once: ClassVar[bool] = False  # its class is imported to check a config; one of files may be large
    # Attenuation in 1/mm that x = 1 means; None: that of hu_max, which depends on the attenuation of water
    attenuation_of_one: ClassVar[float | None] = None

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
    views: Annotated[list[Annotated[int, Ge(1), Le(8192)]], Len(0, 64)] = Field(default_factory=list)
    arcs: Annotated[list[Annotated[float, Gt(0), Le(360)]], Len(0, 64)] = Field(default_factory=list)
    seed: Seed

    @property
    def n_scans(self) -> int:
        """Scans of which each training step draws one; 0: all steps have that of `geometry`."""
        return max(1, len(self.views)) * max(1, len(self.arcs)) if self.views or self.arcs else 0

    @property
    def hu_scaling(self) -> tuple[float, float]:
        """(offset, scale) of HU = offset + scale · x with scaling=attenuation, the same for every slice."""
        return -1000.0, self.hu_max + 1000.0

    @property
    def has_truth(self) -> bool:
        """Whether each slice has a true image: its class has `load`, or reads files that are no sinograms."""
        loaded = self.load()
        return hasattr(loaded, "load") or (hasattr(loaded, "read") and not self.measured)

    @property
    def at_true_size(self) -> bool:
        """Whether a source resamples its slices at the size that their files give."""
        sources = self.by_section().values()
        return any(isinstance(source, FolderData) and source.pixel_size == "header" for source in sources)

    def by_section(self) -> dict[str, "DataConfig"]:
        """The sources of the slices, by config section: this source itself, or each source of a mix."""
        return {"data": self}

    def with_each_source(self, change: "Callable[[DataConfig], DataConfig]") -> "DataConfig":
        """The same config with each source changed."""
        return change(self)

    def checked(self) -> Self:
        """Itself, after a check of its arguments, and of the keys that change images if its sinograms are measured.

        A class that reads files checks its arguments when it is built.
        """
        section = super().checked() if self.read_at_once else self
        if section.measured:
            check_untouched(section)
        return section


class PhantomData(DataConfig):
    """Random phantoms: no files needed. `PhantomSource` has their keys."""

    TARGET: ClassVar[str] = "qnmixer.data.PhantomSource"
    read_at_once: ClassVar[bool] = True

    @model_validator(mode="after")
    def _twice_as_fine(self) -> Self:
        if (factor := self.simulation_factor) > 2:  # they are painted at twice the image size
            raise ValueError(f"simulation_factor={factor} is too large: give 2 or less")
        return self


class FolderData(DataConfig):
    """The keys of every source of files. Its reader is built with `(**arguments)`.

    conf/data/_folder.yaml says what each key is. train_patients may be empty: all patients who are in no other list.
    """

    kind: ClassVar[Kind] = Kind(
        "a class with kind, wanted and read, which data=custom does not need",
        lambda loaded: isinstance(loaded, type) and all(hasattr(loaded, name) for name in ("kind", "wanted", "read")),
    )
    n_positional: ClassVar[int] = 0
    supplied: ClassVar[tuple[str, ...]] = ()

    root: str | None
    include: str
    patient_from: Literal["tag", "folder"]
    split: Literal["random", "explicit", "train", "all"]
    val_fraction: Annotated[float, Gt(0), Lt(1)]
    test_fraction: Annotated[float, Gt(0), Lt(1)]
    train_patients: list[str]
    val_patients: list[str]
    test_patients: list[str]
    cache_dir: str | None
    pixel_size: Literal["field_of_view", "header"] = "field_of_view"

    @model_validator(mode="after")
    def _split(self) -> Self:
        if self.split != "explicit" and (self.train_patients or self.val_patients or self.test_patients):
            raise ValueError(f"split={self.split} uses no lists of patients: give split=explicit, or leave them out")
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError("val_fraction + test_fraction leave nothing to train on: lower them")
        return self


class SinogramData(FolderData):
    """A folder of measured sinograms without images. `SinogramReader` has their keys."""

    TARGET: ClassVar[str] = "qnmixer.data.SinogramReader"
    supplied: ClassVar[tuple[str, ...]] = ("geometry", "hu_max")
    measured: ClassVar[bool] = True
    read_at_once: ClassVar[bool] = True

    def checked(self) -> Self:
        """Also a key that images alone have."""
        section = super().checked()
        if section.pixel_size != "field_of_view":
            raise ConfigError(f"data.pixel_size={section.pixel_size} is of images, which data={section.name} lacks")
        return section


class MixedData(DataConfig):
    """Several sources, each with its share of the training samples and its own split.

    conf/data/mixed.yaml says what each key is. An epoch has each training slice of the first source with a share once.
    """

    TARGET: ClassVar[str] = "qnmixer.data.MixedSource"

    evaluate_on: str
    sources: dict[str, dict[str, Any]]  # a share, a target or an option's name, and keys beside the common ones

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.arguments:
            raise unknown_key(f"data.{next(iter(self.arguments))}")
        for name, share in self.shares.items():
            validated(Annotated[float, Ge(0), Le(1)], share, f"data.sources.{name}.share")
        if abs(sum(self.shares.values()) - 1) > 1e-6:
            listed_shares = ", ".join(f"{name} {share:g}" for name, share in self.shares.items()) or "none"
            raise ConfigError(f"the shares of data.sources ({listed_shares}) must add up to 1")
        if self.evaluate_on not in self.sources:
            raise ConfigError(f"data.evaluate_on={self.evaluate_on} is no source: give one of data.sources")
        sources = self.by_section()
        if pairs := [section for section, source in sources.items() if isinstance(source, PairData)]:
            raise ConfigError(f"{pairs[0]} has images and sinograms of its own: take it alone, not in data={self.name}")
        self.sources = self._written(sources)
        return self

    @property
    def shares(self) -> dict[str, Any]:
        """The share of each source in the training samples, by name."""
        return {name: source.get("share") for name, source in self.sources.items()}

    def by_section(self) -> dict[str, DataConfig]:
        """The sources by their section of the config, each as it would be alone. Raises ConfigError."""
        return {
            f"data.sources.{name}": self._source(f"data.sources.{name}", section_keys)
            for name, section_keys in self.sources.items()
        }

    def _common(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in DataConfig.model_fields if key != "target"}

    def _source(self, section: str, section_keys: dict[str, Any]) -> DataConfig:
        common = self._common()
        if shared_key := next(iter(section_keys.keys() & common.keys()), None):
            raise ConfigError(f"{section}.{shared_key} is the same for all sources: give it as data.{shared_key}")
        values = {key: value for key, value in section_keys.items() if key not in ("share", "name")}
        if TARGET not in section_keys or "name" in section_keys:
            names = [option for option in (*options("data"), "custom") if option != self.name]
            if (option := section_keys.get("name")) not in names:
                raise ConfigError(f"{section}.name={option} is not known: choose {', '.join(names)}")
            values = {**values_of_option("data", str(option)), **values}
        if missing := next((key for key, value in values.items() if value == "???"), None):
            raise has_no_value(f"{section}.{missing}")
        source: DataConfig = validated(Source, values | common, section)
        return source.at(section)

    def _written(self, sources: Mapping[str, DataConfig]) -> dict[str, dict[str, Any]]:
        """Sources in the form of the key `sources`."""
        common = self._common()
        return {
            name: {"share": share, **{key: value for key, value in source.plain().items() if key not in common}}
            for (name, share), source in zip(self.shares.items(), sources.values(), strict=True)
        }

    def with_each_source(self, change: Callable[[DataConfig], DataConfig]) -> Self:
        """As for a single source."""
        return self.changed(sources=self._written({key: change(source) for key, source in self.by_section().items()}))

    def checked(self) -> Self:
        """With each source checked."""
        return self.with_each_source(lambda source: source.checked())

    def targets(self) -> dict[str, str]:
        """The targets of all sources too."""
        return super().targets() | {source.key: source.target for source in self.by_section().values()}


class PairData(DataConfig):
    """A public set of sinograms and reference images. Its class has the other keys, and says what its numbers mean."""

    read_at_once: ClassVar[bool] = True

    root: str | None

    def keywords(self) -> dict[str, Any]:
        """The arguments of the set's reader."""
        return super().keywords() | {"root": self.root}

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
        return self.settings().get("max_attenuation") or self.load().attenuation_of_one

    @property
    def hu_scaling(self) -> tuple[float, float]:
        """That of the set, if it has one."""
        return getattr(self.load(), "hu_scaling", None) or super().hu_scaling


def _kind_of_source(values: Any) -> str:
    """Which of the classes above a section belongs to. A user's own class with keys of _folder.yaml reads files."""
    values = values if isinstance(values, Mapping) else {}
    of_targets = {PhantomData.TARGET: "phantoms", MixedData.TARGET: "mixed", SinogramData.TARGET: "sinograms"}
    if (target := str(values.get(TARGET))) in of_targets:
        return of_targets[target]
    if {"patient_from", "val_fraction"} & values.keys():
        return "folder"
    return "pairs" if "root" in values and is_trusted(target, ()) else "other"


Source = Annotated[
    Annotated[PhantomData, Tag("phantoms")]
    | Annotated[MixedData, Tag("mixed")]
    | Annotated[SinogramData, Tag("sinograms")]
    | Annotated[FolderData, Tag("folder")]
    | Annotated[PairData, Tag("pairs")]
    | Annotated[DataConfig, Tag("other")],
    Discriminator(_kind_of_source),
]


def check_untouched(config: DataConfig) -> None:
    """Raise ConfigError for a key that changes images: measured sinograms would not follow."""
    for key, value in {"augment": False, "disc": False, "simulation_factor": 1, "scaling": "attenuation"}.items():
        if (current := getattr(config, key)) != value:
            raise ConfigError(f"data.{key}={current} changes images, and measured sinograms would not follow")
