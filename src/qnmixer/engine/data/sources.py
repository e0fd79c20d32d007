"""The slices of each split (train, val, test), from the class that `data._target_` names.

This is a class of slices or a reader of files. A class of slices is built with `(part, **arguments)`. It has `__len__`,
`load(index)` → [H, W] in HU, and optionally `name(index)`. Its slices are resampled to the size of the network. A class
with an argument `image_size` draws its slices in that size. If it also has an argument `fine`, then fine=True must give
the same slices on a finer grid.

With a method `sinogram(index)` → [V, D], value × mm, the sinograms are measured: nothing is simulated, and no noise is
added. An argument `geometry` gets the scan, `hu_max` gets that key. The class may have `scaling`, see
`qnmixer.engine.data.scaling`, and `warnings`, lines that are printed once.

A reader decodes the files of a folder, see `qnmixer.engine.data.cache.Reader`.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qnmixer.engine.config.data import DataConfig, FolderData, MixedData, PairData, check_untouched
from qnmixer.engine.data.cache import open_cache
from qnmixer.engine.data.dataset import Part, SliceView
from qnmixer.engine.data.mixed import MixedSource, counts_of
from qnmixer.engine.data.resample import to_square
from qnmixer.engine.data.slices import (
    NO_AIR,
    FloatArray,
    SkipFile,
    SliceSource,
    clean_hu,
    doubt,
    is_no_hu,
    summarise_skipped,
)
from qnmixer.engine.data.splits import PARTS, RunSplit, few, files_as_patients, join_patients, patients_of
from qnmixer.engine.plugins import taken
from qnmixer.engine.processes.ranks import rank
from qnmixer.errors import ConfigError, DataError, UserError
from qnmixer.physics import FanBeamGeometry


def parts_of(
    config: DataConfig, split: RunSplit, geometry: FanBeamGeometry | None = None, section: str = "data"
) -> dict[str, Part]:
    """train, val and test. Raises PluginError for a class that does not fit, DataError for files that cannot be read.

    Args:
        config: of the slices.
        split: the patients of each part. It records a split that is drawn here.
        geometry: the scan; None if nothing needs it.
        section: section of the config.
    """
    if isinstance(config, MixedData):
        return _of_mix(config, split, geometry)
    if isinstance(config, FolderData):
        return _of_folder(config, split, geometry, section)
    return _of_class(config, geometry)


def _of_class(config: DataConfig, geometry: FanBeamGeometry | None) -> dict[str, Part]:
    takes = taken(config.load(), {"image_size": None, "fine": None, "geometry": None})
    if isinstance(config, PairData) and not config.root:
        raise ConfigError(f"data={config.name} needs data.root=FOLDER, the folder of the set")
    if "geometry" in takes and geometry is None:
        raise ConfigError(f"data={config.name} needs the scan: give the DataModule its geometry")
    key = f"data._target_={config._target_}"

    def built(part: str, factor: int) -> tuple[Any, SliceSource]:
        """An object of the class, and its slices on a grid that is finer by a factor."""
        size = config.image_size * factor
        offered: dict[str, Any] = {"image_size": config.image_size if "fine" in takes else size, "fine": factor > 1}
        offered |= {"geometry": geometry, "hu_max": config.hu_max, "seed": config.seed}
        its: Any = config.build(part, offered=offered)
        is_source = "image_size" in takes and hasattr(its, "endless")
        return its, its if is_source else Resampled(its, key, part, size)

    parts = {}
    for part in PARTS:
        its, slices = built(part, 1)
        for line in getattr(its, "warnings", ()):
            _warn(line)
        measured = None
        if config.measured if isinstance(config, PairData) else hasattr(its, "sinogram"):
            check_untouched(config)
            measured = Sinograms(its, key, slices.name, geometry)
        fine = built(part, config.simulation_factor)[1] if config.simulation_factor > 1 else None
        parts[part] = Part(slices, fine=fine, measured=measured, scaling=getattr(its, "scaling", None))
    return parts


class Sinograms:
    """The measured sinograms of one part, [V, D], value × mm.

    Args:
        slices: has `sinogram(index)`.
        key: the config key of its class, for messages.
        name: gives the name of a slice from its number.
        geometry: the scan; None if it is not known.
    """

    endless = False

    def __init__(self, slices: Any, key: str, name: Callable[[int], str], geometry: FanBeamGeometry | None) -> None:
        self.slices, self.key, self.name, self.geometry = slices, key, name, geometry

    def __len__(self) -> int:
        return len(self.slices)

    def load(self, index: int) -> FloatArray:
        """Sinogram [V, D]. Raises DataError for one that does not fit the scan."""
        y = np.asarray(self.slices.sinogram(index), np.float32)
        shape = y.shape if self.geometry is None else (self.geometry.n_views, self.geometry.n_detectors)
        if y.shape != shape or not np.isfinite(y).all():
            fits = f"has the shape {[*y.shape]}, not {[*shape]}, as geometry has views and bins"
            what = fits if y.shape != shape else "has NaN or infinite values"
            raise DataError(f"{self.key}: the sinogram of {self.name(index)} {what}")
        return y


class Resampled:
    """Slices of one split, [size, size] in HU, from slices of any size.

    Args:
        slices: has `__len__`, `load(index)` → [H, W] in HU, and optionally `name(index)`.
        key: the config key of the class, for messages.
        part: train, val or test.
        size: rows and columns.
    """

    endless = False

    def __init__(self, slices: SliceSource, key: str, part: str, size: int) -> None:
        self.slices, self.key, self.part, self.size = slices, key, part, size

    def __len__(self) -> int:
        return len(self.slices)

    def load(self, index: int) -> FloatArray:
        """Slice [size, size] in HU. Raises DataError if the class returns something else."""
        hu = self.slices.load(index)
        try:
            if getattr(hu, "ndim", None) != 2:
                raise SkipFile("it is no array [H, W]")
            hu = clean_hu(hu)
            low, high = float(hu.min()), float(hu.max())
            if low < high and is_no_hu(low, high) and not hasattr(self.slices, "scaling"):
                raise SkipFile(f"values from {low:g} to {high:g}, which are not HU, air −1000 and water 0")
            return to_square(hu, self.size)
        except SkipFile as reason:
            raise DataError(f"{self.key}: {self.name(index)} cannot be used ({reason})") from None

    def name(self, index: int) -> str:
        """The name that its class gives, or the number of the slice."""
        named = getattr(self.slices, "name", None)
        return str(named(index)) if named else f"{self.part} {index}"


def _of_folder(config: FolderData, run: RunSplit, geometry: FanBeamGeometry | None, section: str) -> dict[str, Part]:
    if not config.root:
        raise ConfigError(f"data={config.name} needs data.root=FOLDER, the folder with the slices")
    field_of_view = None
    if config.pixel_size == "header":
        if geometry is None:
            raise ConfigError(f"{section}.pixel_size=header needs the scan: give the DataModule its geometry")
        field_of_view = geometry.field_of_view
    opened = partial(
        open_cache,
        config.build(),
        Path(config.root).expanduser(),
        include=config.include,
        cache_dir=Path(config.cache_dir).expanduser() if config.cache_dir else None,
        field_of_view=field_of_view,
        own=() if config._target_.startswith("qnmixer.") else (config._target_, sorted(config.arguments.items())),
    )
    cache = opened(config.image_size)
    if cache.skipped:
        _warn(summarise_skipped(str(config.root), cache.skipped))
    if cache.hu_range[0] > NO_AIR:
        _warn(doubt(str(config.root)))
    if field_of_view is not None and (line := cache.cut.line(str(config.root), field_of_view)):
        _warn(line)
    if config.split == "slices":
        _warn("data.split=slices puts neighbouring slices into train and test: scores will be too good")
    patients = patients_of(cache.infos, config)
    by_tag = config.patient_from == "tag" and config.split != "aapm"
    one, joined = join_patients(cache.infos, patients)
    if joined:
        rule = "data.split=aapm" if config.split == "aapm" else "data.patient_from=folder"
        _warn(
            f"{config.root}: files of one study or series name several patients ({few(joined)}): they count as "
            + ("one patient (data.patient_from=folder takes folders instead)" if by_tag else f"several, by {rule}")
        )
    patients = one if by_tag else patients
    good, narrow = "scores will be too good", "intervals will be too narrow"
    too = {"random": good, "explicit": good, "all": narrow}.get(config.split)
    if too and len(files := files_as_patients(cache.infos, patients)) > 1:
        _warn(
            f"{config.root}: each of {len(files)} files with one slice counts as a patient ({few(files)}): if several "
            f"are of one patient, make a folder for each patient, or {too}"
        )
    split, new = run.settle(section, cache.infos, patients, cache.digests, config)
    if new:
        _warn(
            f"{config.root}: {len(new)} of its patients were not there when the run began, and are in none of its "
            f"parts: {few(new)}"
        )
    factor = config.simulation_factor
    fine = None if factor == 1 else opened(config.image_size * factor)
    if fine is not None and fine.infos != cache.infos:  # its slices are taken by their number
        raise DataError(f"data.root={config.root} changed while its slices were read at two sizes: start again")
    return {
        part: Part(
            SliceView(cache, split[part]),
            _numbered(patients[i] for i in split[part]),
            fine and SliceView(fine, split[part]),
        )
        for part in PARTS
    }


def _numbered(names: Iterable[Hashable]) -> list[int | None]:
    """A number for each patient, the same for the same name. None stays None."""
    numbers: dict[Hashable, int] = {}
    return [None if name is None else numbers.setdefault(name, len(numbers)) for name in names]


def _warn(line: str) -> None:
    """Warn once per run, not in every process."""
    if rank() == 0:
        warnings.warn(line, stacklevel=3)


def _of_mix(config: MixedData, split: RunSplit, geometry: FanBeamGeometry | None) -> dict[str, Part]:
    """Training slices by share. Validation and test slices of one source, or of all."""
    sources: dict[str, dict[str, Part]] = {}
    for key, source in config.by_section().items():
        with _of_section(key):
            sources[key] = parts = parts_of(source, split, geometry, key)
            if parts["train"].measured is not None:
                raise ConfigError(f"data={config.name} cannot use measured sinograms: take their source alone")
            if not len(parts["train"].source) and config.shares[key.rpartition(".")[2]]:
                raise DataError(f"{nothing_for('train', source)}, or share=0")
    train = [parts["train"] for parts in sources.values()]
    counts = counts_of(list(config.shares.values()), [len(part.source) for part in train])
    for (name, share), count in zip(config.shares.items(), counts, strict=True):
        if share and not count:
            raise DataError(f"data.sources.{name}.share={share} gives no slice in an epoch of {sum(counts)}: raise it")
    shares = "; ".join(
        f"{share:.4g} {name}: {count} {'new ones' if part.source.endless else f'of {part}'}"
        for (name, share), count, part in zip(config.shares.items(), counts, train, strict=True)
        if share
    )

    def measured(name: str) -> Part:
        if config.evaluate_on is not None:
            return sources[f"data.sources.{config.evaluate_on}"][name]
        return _whole_mix([parts[name] for parts in sources.values()], config.seed)

    return {"train": replace(_mix(train, counts, config.seed), shares=shares)} | {n: measured(n) for n in PARTS[1:]}


def _mix(parts: Sequence[Part], counts: Sequence[int], seed: int) -> Part:
    fine = [part.fine for part in parts if part.fine is not None]
    source = MixedSource([part.source for part in parts], counts, seed=seed)
    return Part(source, (), MixedSource(fine, counts, seed=seed) if fine else None)


def _whole_mix(parts: Sequence[Part], seed: int) -> Part:
    """All slices of several sources, with their patients."""
    mix = _mix(parts, [len(part.source) for part in parts], seed)
    assert isinstance(mix.source, MixedSource)
    places = [mix.source.place(index) for index in range(len(mix.source))]
    return replace(mix, patients=_numbered((k, parts[k].patients[n]) if parts[k].patients else None for k, n in places))


@contextmanager
def _of_section(key: str) -> Iterator[None]:
    """Name the source of a mix in an error of the block."""
    try:
        yield
    except UserError as error:
        raise (type(error)(f"{error} ({key})") if key != "data" else error) from error


def nothing_for(part: str, config: DataConfig) -> str:
    """The message for a split without slices."""
    hint = ""
    if isinstance(config, FolderData):
        if config.split != "all":  # only the record of a run leaves a part empty
            return (
                f"data.root={config.root} has none of the run's slices for {part}: give the folder that has them "
                f"(evaluate takes other slices with data={config.name} data.root=FOLDER)"
            )
        hint = " with data.split=all; choose another split"
    elif isinstance(config, MixedData):
        hint = f" with data.evaluate_on={config.evaluate_on}; choose a source that has some"
    return f"data={config.name} has no slices for {part}{hint}"
