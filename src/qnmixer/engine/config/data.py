"""Schema of `data`: the keys of each source of slices, their bounds, and the rules between them."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from qnmixer.engine.config.option import number, one_of
from qnmixer.engine.config.section import parse_section
from qnmixer.engine.config.target import TARGET, Target, keys_of, keys_of_options, option_of, options, values_of_option
from qnmixer.errors import ConfigError, DataError, suggest
from qnmixer.files import check_no_nifti, check_there

if TYPE_CHECKING:
    from qnmixer.engine.config.run import Config

LOADING = "batch_size", "num_workers", "prefetch_factor", "pin_memory", "cache_dir"
"""Keys of how slices are loaded. They change no slice."""
_WATER, _AIR, _LARGEST = 20.0, 0.02, 81.35858
"""Attenuation in 1/m in LoDoPaB-CT: x = (HU·(water − air)/1000 + water)/largest."""
_PER_HU = (_WATER - _AIR) / 1000
LODOPAB_HU = -_WATER / _PER_HU, _LARGEST / _PER_HU
"""(offset, scale) of HU = offset + scale · x in LoDoPaB-CT."""

_T = TypeVar("_T", bound="DataConfig")
_SCHEMAS: dict[str, type["DataConfig"]] = {}
_OPEN: list[type["DataConfig"]] = []


def schema(*targets: str) -> Callable[[type[_T]], type[_T]]:
    """Register a dataclass as the schema of these targets. Without targets it is that of all others."""

    def register(cls: type[_T]) -> type[_T]:
        _SCHEMAS.update(dict.fromkeys(targets, cls))
        if not targets:
            _OPEN.append(cls)
        return cls

    return register


@schema()
@dataclass(kw_only=True)
class DataConfig(Target):
    """The keys of every source. `qnmixer.engine.data.sources` builds a class of slices with `(part, **arguments)`.

    Attributes:
        image_size: rows and columns that slices are resampled to, S.
        batch_size: slices per device and step.
        num_workers: processes that load slices; 0 loads in the main process.
        prefetch_factor: batches that each worker prepares ahead.
        pin_memory: page-locked host memory for faster copies to a GPU; null: yes if there is a GPU.
        scaling: "attenuation" (the same for every slice) or "minmax" (per slice, as in the paper).
        hu_max: HU that attenuation scaling maps to 1; −1000 maps to 0.
        augment: random flips and quarter turns of training slices.
        simulation_factor: sinograms are simulated on a grid this many times finer. Simulation and reconstruction then
            use different matrices, which keeps scores honest. 1: the grid of the image, as in most papers. Phantoms
            allow up to 2. Files with fewer pixels than image_size · simulation_factor are upsampled.
        disc: paste a bright disc into every slice, the paper's test out of distribution.
        train_slices: train on this many different slices only, evenly spread over all. Phantoms are then the same in
            every epoch.
        seed: of phantoms, splits, order and augmentation.
    """

    group: ClassVar[str] = "data"
    own_range: ClassVar[bool] = False
    """Whether PSNR and SSIM take each reference's own range, as skimage does, instead of 1."""

    image_size: int = number(at_least=8, at_most=8192)
    batch_size: int = number(at_least=1, at_most=2**20)
    num_workers: int = number(at_least=0, at_most=1024)
    prefetch_factor: int = number(at_least=1, at_most=1024)
    pin_memory: bool | None
    scaling: str = one_of("attenuation", "minmax")
    hu_max: float = number(above=-1000)
    augment: bool
    simulation_factor: int = number(at_least=1, at_most=16)
    disc: bool
    train_slices: int | None = number(at_least=1, at_most=10**9)
    seed: int = number(at_least=0, at_most=2**32 - 1)

    @classmethod
    def schema_of(cls, section: Mapping[str, Any]) -> type["DataConfig"]:
        """The schema of a source with this target. Another target has that without a target which shares most keys."""
        super().schema_of(section)
        # A user's own reader of files has the schema of our readers. Its keys, such as root and split, show it.
        fitting = [it for it in sorted(_OPEN, key=lambda it: len(_needed(it))) if _needed(it) <= section.keys()]
        return _SCHEMAS.get(section[TARGET]) or [cls, *fitting][-1]

    @classmethod
    def odd_argument(cls, target: str, arguments: Mapping[str, Any]) -> str | None:
        """The first argument that is not in the schema of our own class, or that is a key of another option."""
        if odd := next((key for key in arguments if key.startswith("_")), None):
            raise ConfigError(f"data.{odd} is not known: give {TARGET} and arguments of the target only")
        if target in _SCHEMAS:
            return next(iter(arguments), None)
        if not arguments or (mine := option_of("data", target)) == target:
            return None
        keys = keys_of_options("data")
        others = {key for option, its in keys.items() if option != mine for key in its} - {*keys[mine]} | {"name"}
        return next((key for key in arguments if key in others), None)

    def keywords(self) -> dict[str, Any]:
        """The arguments that only this source has."""
        return self.arguments

    @property
    def measured(self) -> bool:
        """Whether its sinograms were measured by a scanner."""
        return False

    @property
    def attenuation_of_one(self) -> float | None:
        """Attenuation in 1/mm that x = 1 means; None: that of hu_max, which depends on the attenuation of water."""
        return None

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
        """The same config without private values: folders, people and patients."""
        return replace(self, arguments={})


def _needed(cls: type[DataConfig]) -> set[str]:
    return {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}


@schema("qnmixer.engine.data.phantoms.PhantomSource")
@dataclass(kw_only=True)
class PhantomData(DataConfig):
    """Random phantoms: no files needed.

    Attributes:
        n_train: slices that count as one epoch; every epoch has new slices.
        n_val: validation phantoms, always the same.
        n_test: test phantoms, always the same.
        anatomy_share: share of the phantoms that resemble a body; the rest are ellipses.
    """

    simulation_factor: int = number(at_least=1, at_most=2)  # they are painted at twice the image size
    n_train: int = number(at_least=1, at_most=10**9)
    n_val: int = number(at_least=1, at_most=10**7)
    n_test: int = number(at_least=1, at_most=10**7)
    anatomy_share: float = number(at_least=0, at_most=1)

    def keywords(self) -> dict[str, Any]:
        """The arguments that phantoms are drawn with."""
        return {key: getattr(self, key) for key in ("n_train", "n_val", "n_test", "anatomy_share", "seed")}


@schema()
@schema(
    "qnmixer.engine.data.deeplesion.DeepLesionReader",
    "qnmixer.engine.data.dicom.DicomReader",
    "qnmixer.engine.data.numpy_files.NumpyReader",
)
@dataclass(kw_only=True)
class FolderData(DataConfig):
    """The keys of every source of files. Its reader is built with `(**arguments)`.

    Attributes:
        root: folder that is searched to any depth.
        include: only files whose path below root matches this pattern, such as "*/full_3mm/*".
        pixel_size: "field_of_view" (every slice is as wide as the scan's field) or "header" (each slice has the size
            that its file gives, and what lies outside the field is cut).
        patient_from: "tag" (the patient's tag, or the folder if the tag is empty) or "folder".
        split: "random" (by patient), "aapm" (by the challenge's names), "explicit" (the three lists below), "slices"
            (blocks of every series: leaks anatomy between the parts) or "all" (everything is test).
        val_fraction: share of the patients for validation (random), or of each series (slices).
        test_fraction: the same for test.
        train_patients: for split=explicit; empty: all patients who are in no other list.
        val_patients: for split=explicit.
        test_patients: for split=explicit.
        cache_dir: folder of the decoded slices; null: $XDG_CACHE_HOME/qnmixer or ~/.cache/qnmixer.
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
    pixel_size: str = one_of("field_of_view", "header", default="field_of_view")

    def without_places(self) -> Self:
        """Also without folders and patients."""
        return replace(
            super().without_places(),
            root=None, include="*", cache_dir=None, train_patients=[], val_patients=[], test_patients=[],
        )  # fmt: skip

    def check(self, run: "Config") -> None:
        """Check the parts of a split."""
        if self.split != "explicit" and (self.train_patients or self.val_patients or self.test_patients):
            raise ConfigError(f"lists of patients are used only with data.split=explicit, not data.split={self.split}")
        if self.val_fraction + self.test_fraction >= 1:
            raise ConfigError(
                "data.val_fraction and data.test_fraction leave nothing to train on: their sum must be below 1"
            )


@schema("qnmixer.engine.data.mixed.MixedSource")
@dataclass(kw_only=True)
class MixedData(DataConfig):
    """Several sources, each with its share of the training samples and its own split.

    Attributes:
        evaluate_on: name of the source that gives the validation and test slices; None: all sources together.
        sources: by name: a share, a source's target, and its keys beside the common ones. Instead of a target one may
            give an option's name (numpy, say), which brings its defaults. An epoch has each training slice of the first
            source with a share once.
    """

    evaluate_on: str | None
    sources: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        common = self._common()
        for name, share in self.shares.items():
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ConfigError(f"data.sources.{name}.share={share} is not a share: give a number from 0 to 1")
        total = sum(self.shares.values())
        if abs(total - 1) > 1e-6:
            each = ", ".join(f"{name} {share:g}" for name, share in self.shares.items()) or "none"
            raise ConfigError(f"the shares of data.sources ({each}) add up to {total:g}: they must add up to 1")
        if self.evaluate_on is not None and self.evaluate_on not in self.sources:
            raise ConfigError(
                f"data.evaluate_on={self.evaluate_on}: {suggest(self.evaluate_on, self.sources)}, or null"
            )
        if pairs := [name for name, it in self.by_section().items() if isinstance(it, PairData)]:
            raise ConfigError(f"{pairs[0]} has images and sinograms of its own: take it alone, not in data={self.name}")
        self.sources = {
            name: {"share": share, **{key: it for key, it in keys_of(source).items() if key not in common}}
            for (name, share), source in zip(self.shares.items(), self.by_section().values(), strict=True)
        }

    @property
    def shares(self) -> dict[str, Any]:
        """The share of each source in the training samples, by name."""
        return {name: source.get("share") for name, source in self.sources.items()}

    def by_section(self) -> dict[str, DataConfig]:
        """The sources by their section of the config, each as it would be alone. Raises ConfigError."""
        return {f"data.sources.{name}": self._source(f"data.sources.{name}", its) for name, its in self.sources.items()}

    def _common(self) -> dict[str, Any]:
        """The keys that all sources share."""
        ours = {f.name for f in fields(DataConfig)} - {TARGET, "arguments"}
        return {key: getattr(self, key) for key in ours}

    def _source(self, key: str, given: dict[str, Any]) -> DataConfig:
        common = self._common()
        for one in given.keys() & common.keys():
            raise ConfigError(f"{key}.{one} is the same for all sources: give it as data.{one}")
        values = {one: value for one, value in given.items() if one not in ("share", "name")}
        if TARGET not in given or "name" in given:
            values = self._defaults(key, given.get("name")) | values
        missing = next((one for one, value in values.items() if value == "???"), None)
        if missing is not None:
            raise ConfigError(f"{key}.{missing} has no value: give one with {key}.{missing}=…")
        values = common | values
        try:
            source: DataConfig = parse_section(key, DataConfig.schema_of(values), values, {"data": vars(self)})
        except ConfigError as error:
            text = str(error)
            if text.removeprefix(f"{key}.").partition("=")[0] in common:
                raise ConfigError(f"data.{text.removeprefix(f'{key}.')} ({key})") from error
            raise
        return source

    def _defaults(self, key: str, option: Any) -> dict[str, Any]:
        """The defaults of a source's option, without the common keys."""
        known = [one for one in (*options("data"), "custom") if one != self.name]
        if option not in known:
            raise ConfigError(f"{key}.name={option} is not known: {suggest(str(option), known)}")
        return {one: value for one, value in values_of_option("data", option).items() if one not in self._common()}

    def targets(self) -> dict[str, str]:
        """The targets of all sources too."""
        own = {f"{section}.{TARGET}": source._target_ for section, source in self.by_section().items()}
        return super().targets() | own

    def without_places(self) -> Self:
        """Also without the private values of all sources."""
        common, sources = self._common(), self.by_section().values()
        kept = [
            {"share": share, **{key: it for key, it in keys_of(source.without_places()).items() if key not in common}}
            for share, source in zip(self.shares.values(), sources, strict=True)
        ]
        return replace(super().without_places(), sources=dict(zip(self.sources, kept, strict=True)))

    def check(self, run: "Config") -> None:
        """Check the rules of each source."""
        for section, source in self.by_section().items():
            try:
                source.check(run)
            except ConfigError as error:
                raise ConfigError(str(error).replace("data.", f"{section}.")) from error


@dataclass(kw_only=True)
class PairData(DataConfig):
    """The keys of the public sets of sinograms and reference images.

    Attributes:
        root: folder of the set.
    """

    own_range: ClassVar[bool] = True
    scan: ClassVar[dict[str, Any]]
    """Keys of `geometry` that its sinograms fix."""
    option: ClassVar[str]
    """Of `geometry`, which has them."""

    root: str | None

    def __post_init__(self) -> None:
        if self.measured:
            check_untouched(self)

    def keywords(self) -> dict[str, Any]:
        """The arguments of the set's reader."""
        common = {f.name for f in fields(DataConfig)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}

    def without_places(self) -> Self:
        """Also without folders."""
        places: dict[str, Any] = {f.name: None for f in fields(self) if f.name.endswith(("root", "cache_dir"))}
        return replace(super().without_places(), **places)

    def check(self, run: "Config") -> None:
        """Check that the scan is the one that the sinograms were measured with."""
        if self.scaling != "attenuation":
            raise ConfigError(f"data={self.name} has a scale of its own: leave out data.scaling={self.scaling}")
        for key, value in self.scan.items() if self.measured else ():
            its = getattr(run.geometry, key)
            if its != value and not (isinstance(value, float) and abs(its - value) <= 1e-4 * abs(value)):
                raise ConfigError(
                    f"geometry.{key}={its} is not that of data={self.name}, {value}: take geometry={self.option}"
                )


@schema("qnmixer.extras.lodopab.LodopabSource")
@dataclass(kw_only=True)
class LodopabData(PairData):
    """LoDoPaB-CT.

    Attributes:
        sinograms: "measured" (the observations of the set) or "simulated" (from its images).
    """

    scan: ClassVar[dict[str, Any]] = {
        "beam": "parallel", "n_detectors": 513, "detector_pitch": 0.716755, "detector_offset": 0.0,
        "field_of_view": 260.0,
    }  # fmt: skip
    option: ClassVar[str] = "lodopab"

    sinograms: str = one_of("measured", "simulated")

    @property
    def measured(self) -> bool:
        """Whether the observations of the set are used."""
        return self.sinograms == "measured"

    @property
    def attenuation_of_one(self) -> float:
        """That of the set, whose water has a fixed attenuation."""
        return _LARGEST / 1000

    @property
    def hu_scaling(self) -> tuple[float, float]:
        """That of the set: its air is not quite −1000 HU at x = 0."""
        return LODOPAB_HU

    def check(self, run: "Config") -> None:
        """Check hu_max: the images of the set have a unit of their own."""
        super().check(run)
        if self.hu_max != 3071:
            raise ConfigError(
                f"data.hu_max={self.hu_max:g} is not that of data={self.name}, 3071: train with data.hu_max=3071"
            )


@schema("qnmixer.extras.two_detect.TwoDetectSource")
@dataclass(kw_only=True)
class TwoDetectData(PairData):
    """2DeteCT.

    Attributes:
        reference_root: folder of the reference reconstructions; None: root.
        mode: mode of the sinograms.
        max_attenuation: 1/mm that x = 1 means.
        leave_out: numbers of slices that are skipped.
    """

    scan: ClassVar[dict[str, Any]] = {
        "beam": "fan_flat", "n_detectors": 956, "detector_pitch": 0.1496, "detector_offset": 0.0,
        "source_to_axis": 431.019989, "axis_to_detector": 97.980499, "field_of_view": 116.528,
    }  # fmt: skip
    option: ClassVar[str] = "two_detect"

    reference_root: str | None
    mode: int = number(at_least=1, at_most=3)
    max_attenuation: float = number(above=0)
    leave_out: list[int]

    @property
    def measured(self) -> bool:
        """Always."""
        return True

    @property
    def attenuation_of_one(self) -> float:
        """That of the key: the references are attenuations, and their HU follow from it."""
        return self.max_attenuation


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
    simulation_factor: int | None = number(at_least=1, at_most=16)
    disc: bool | None


def check_data(config: DataConfig) -> None:
    """Raise DataError for a folder that does not exist, before its files are searched.

    Raises ConfigError if two sources of a mix share a folder: training slices of one would test the other.
    """
    if isinstance(config, FolderData | PairData) and config.root is not None:
        _check_root("data.root", config.root)
    if isinstance(config, TwoDetectData) and config.reference_root is not None:
        _check_root("data.reference_root", config.reference_root)
    if isinstance(config, MixedData):
        seen: dict[str, Path] = {}
        for name, source in config.sources.items():
            if (root := source.get("root")) is not None:
                _check_root(f"data.sources.{name}.root", root)
                folder = Path(root).expanduser().resolve()
                for other, its in seen.items():
                    if folder.is_relative_to(its) or its.is_relative_to(folder):
                        raise ConfigError(
                            f"data.sources.{name}.root={root} has slices of data.sources.{other} too, and each would "
                            "split them differently: give each source its own folder"
                        )
                seen[name] = folder
    for section, part in config.by_section().items():
        if isinstance(part, FolderData) and part.root is not None:  # a reader of the user's own may take it
            check_no_nifti(f"{section}.root", part.root)


def _check_root(key: str, root: str) -> None:
    check_there(key, root, "the folder with the slices")
    if Path(root).expanduser().is_file():
        raise DataError(f"{key}={root} is a file: give its folder")
