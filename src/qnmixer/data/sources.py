"""The slices of each split (train, val, test), from the class that `data._target_` names.

This is a class of slices or a reader of files. A class of slices is built with `(part, **arguments)`. It has `__len__`,
`load(index)` → [H, W] in HU, and optionally `name(index)`. Its slices are resampled to the size of the network. A class
with an argument `image_size` draws its slices in that size. If it also has an argument `fine`, then fine=True must give
the same slices on a finer grid.

With a method `sinogram(index)` → [V, D], value × mm, the sinograms are measured: nothing is simulated, and no noise but
noise=insert is added. Without `load` there is no truth, and batches have no image. An argument `geometry` gets the
scan, `hu_max` gets that key. The class may have `scaling`, see `qnmixer.data.dataset`, and `warnings`, lines that are
printed once. Its methods may raise `SkipFile` for a slice that cannot be used.

A reader decodes the files of a folder, see `qnmixer.data.cache.Reader`.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from qnmixer.data.cache import SliceCache, open_cache, to_square
from qnmixer.data.dataset import Part, SliceView
from qnmixer.data.sinograms import require_line_integrals
from qnmixer.data.slices import (
    SkipFile,
    SliceSource,
    clean_hu,
    is_no_hu,
    shortlist,
    summarise_skipped,
    unit_warnings,
    usable,
    warn_once,
)
from qnmixer.data.splits import PARTS, RunSplit, files_as_patients, patients_of, traces_of
from qnmixer.errors import ConfigError, DataError, UserError
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.units import FloatArray
from qnmixer.settings.data import DataConfig, FolderData, MixedData, PairData, SinogramData, check_untouched
from qnmixer.settings.plugins import taken


def parts_of(
    config: DataConfig, split: RunSplit, geometry: FanBeamGeometry | None = None, section: str = "data"
) -> dict[str, Part]:
    """train, val and test. Raises PluginError for a class that does not fit, DataError for files that cannot be read.

    `split` records a split that is drawn here. `geometry`: None if nothing needs it.
    """
    if isinstance(config, MixedData):
        return _of_mix(config, split, geometry)
    if isinstance(config, FolderData | PairData) and not config.root:
        raise ConfigError(f"data={config.name} needs data.root=FOLDER, the folder with the slices")
    if isinstance(config, FolderData):
        return _of_folder(config, split, geometry, section)
    return _of_class(config, geometry)


def nothing_for(part: str, config: DataConfig) -> str:
    """The message for a split without slices."""
    line = f"data={config.name} has no slices for {part}"
    if not isinstance(config, FolderData):
        return line
    return (
        f"{line} with data.split={config.split} below {config.root}: choose another split, or give the folder with the "
        f"run's slices (evaluate takes other slices with data={config.name} data.root=FOLDER)"
    )


def _numbered(names: Iterable[Hashable]) -> list[int]:
    """A number for each patient, the same for the same name."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _of_class(config: DataConfig, geometry: FanBeamGeometry | None) -> dict[str, Part]:
    takes = taken(config.load(), {"image_size": None, "fine": None, "geometry": None})
    if "geometry" in takes and geometry is None:
        raise ConfigError(f"data={config.name} needs the scan: give the DataModule its geometry")

    def build_slices(part: str, factor: int) -> Any:
        """The slices of a part on a grid that is finer by a factor."""
        size = config.image_size * factor
        supplied: dict[str, Any] = {"image_size": config.image_size if "fine" in takes else size, "fine": factor > 1}
        supplied |= {"geometry": geometry, "hu_max": config.hu_max, "seed": config.seed}
        slices: Any = config.build(part, supplied=supplied)
        is_drawn = getattr(slices, "endless", False)
        return slices if is_drawn else OwnSlices(slices, f"data._target_={config.target}", part, size, geometry)

    parts = {}
    for part in PARTS:
        source = build_slices(part, 1)
        slices = source.slices if isinstance(source, OwnSlices) else source
        for line in getattr(slices, "warnings", ()):
            warn_once(line)
        measured = config.measured if isinstance(config, PairData) else hasattr(slices, "sinogram")
        if measured:
            check_untouched(config)
        fine = build_slices(part, config.simulation_factor) if config.simulation_factor > 1 else None
        patients = _numbered(getattr(slices, "patients", ())) if isinstance(config, PairData) else ()
        parts[part] = Part(source, patients, fine, measured, getattr(slices, "scaling", None))
    return parts


class OwnSlices:
    """Slices of one split from a class of files or of the user's own, [size, size] in HU, and their measured sinograms.

    The class is as this module says. `key`: its config key, for messages. `geometry`: None if it is not known.
    """

    endless = False

    def __init__(self, slices: Any, key: str, part: str, size: int, geometry: FanBeamGeometry | None) -> None:
        self.slices, self.key, self.part, self.size, self.geometry = slices, key, part, size, geometry

    def __len__(self) -> int:
        return len(self.slices)

    def load(self, index: int) -> FloatArray:
        """Slice [size, size] in HU. Raises DataError if the class returns something else."""
        with usable(f"{self.key}: {self.name(index)}"):
            hu = self.slices.load(index)
            if getattr(hu, "ndim", None) != 2:
                raise SkipFile("it is no array [H, W]")
            hu = clean_hu(hu)
            low, high = float(hu.min()), float(hu.max())
            if low < high and is_no_hu(low, high) and not hasattr(self.slices, "scaling"):
                raise SkipFile(f"values from {low:g} to {high:g}, which are not HU, air −1000 and water 0")
            return to_square(hu, self.size)

    def sinogram(self, index: int) -> FloatArray:
        """Measured sinogram [V, D], value × mm. Raises DataError for one that does not fit the scan."""
        with usable(f"{self.key}: {self.name(index)}"):
            y = np.asarray(self.slices.sinogram(index), np.float32)
            shape = y.shape if self.geometry is None else (self.geometry.n_views, self.geometry.n_detectors)
            if y.shape != shape:
                raise SkipFile(f"a sinogram of shape {[*y.shape]}, not {[*shape]}, as geometry has views and bins")
            if not np.isfinite(y).all():
                raise SkipFile("NaN or infinite values in its sinogram")
            if self.geometry is not None and not hasattr(self.slices, "load"):  # else it is compared with its image
                require_line_integrals(y, self.geometry)
        return y

    def name(self, index: int) -> str:
        """The name that its class gives, or the number of the slice."""
        named = getattr(self.slices, "name", None)
        return str(named(index)) if named else f"{self.part} {index}"


def _of_folder(config: FolderData, run: RunSplit, geometry: FanBeamGeometry | None, section: str) -> dict[str, Part]:
    field_of_view = None
    if config.pixel_size == "header":
        if geometry is None:
            raise ConfigError(f"{section}.pixel_size=header needs the scan: give the DataModule its geometry")
        field_of_view = geometry.field_of_view
    scan = geometry if isinstance(config, SinogramData) else None
    if isinstance(config, SinogramData) and scan is None:
        raise ConfigError(f"data={config.name} needs the scan: give the DataModule its geometry")
    cache = open_cache(config, config.image_size, field_of_view, scan)
    patients = patients_of(cache.infos, config)
    for line in _doubts(config, cache, patients):
        warn_once(line)
    # Sinograms look alike, whatever they are of.
    traces = traces_of(cache.infos, cache.originals, cache.looks, config) if scan is None else ()
    split, new_patients = run.settle(section, patients, cache.digests, config, traces)
    if new_patients:
        warn_once(
            f"{config.root}: {len(new_patients)} of its patients came after the run began, and are in no part: "
            f"{shortlist(new_patients)}"
        )
    fine = None
    if config.simulation_factor > 1:
        fine = open_cache(config, config.image_size * config.simulation_factor, field_of_view)
    return {
        part: Part(
            SliceView(cache, indices),
            _numbered(patients[i] for i in indices),
            fine and SliceView(fine, indices),
            measured=scan is not None,
        )
        for part, indices in split.items()
    }


def _doubts(config: FolderData, cache: SliceCache, patients: list[str]) -> Iterator[str]:
    """What a user should know about the slices of a folder."""
    root = str(config.root)
    if cache.skipped:
        yield summarise_skipped(root, cache.skipped, config.section)
    if not isinstance(config, SinogramData):
        yield from unit_warnings(root, patients, "patients", [info.path for info in cache.infos], cache.signs)
    if cache.clashes:
        yield (
            f"{root}: {len(cache.clashes)} slices have the SOPInstanceUID of another slice, but other pixels: each "
            f"counts ({shortlist(cache.clashes)})"
        )
    first = dict(zip(reversed(cache.digests), reversed(cache.infos), strict=True))
    if equal := [i.name for i, number in zip(cache.infos, cache.digests, strict=True) if first[number].path != i.path]:
        yield f"{root}: {len(equal)} slices have the pixels of one in another file: both count ({shortlist(equal)})"
    if twins := _twins(cache, patients):
        n = len({patient for patient, _ in twins})
        yield (
            f"{root}: {len(twins)} slices of {n} patient{'s' * (n > 1)} are within a millimetre of a slice of another "
            f"series of the patient, as quarter dose is of full dose: both count as truths "
            f"({shortlist([name for _, name in twins])}). To take one series of each, give data.include="
        )
    files = files_as_patients(cache.infos, patients)
    if len(files) > 1:
        yield (
            f"{root}: each of {len(files)} files with one slice counts as a patient ({shortlist(files)}): if several "
            "are of one patient, make a folder for each patient, or scores will be too good and intervals too narrow"
        )


def _twins(cache: SliceCache, patients: Sequence[str]) -> list[tuple[str, str]]:
    """(patient, name) of slices at the place of another slice, of the same patient and of an earlier series.

    Only files with UIDs count: what has no position of a scanner is numbered, and numbers are equal everywhere.
    """
    series_at: dict[tuple[str, int], str] = {}
    return [
        (patient, info.name)
        for info, patient in zip(cache.infos, patients, strict=True)
        if info.uids and series_at.setdefault((patient, round(info.position)), info.series) != info.series
    ]


def _of_mix(config: MixedData, split: RunSplit, geometry: FanBeamGeometry | None) -> dict[str, Part]:
    """Training slices by share. Validation and test slices of one source."""
    sources: dict[str, dict[str, Part]] = {}
    for (name, share), (section, source) in zip(config.shares.items(), config.by_section().items(), strict=True):
        try:
            sources[name] = parts_of(source, split, geometry, section)
            if sources[name]["train"].measured:
                raise ConfigError(f"data={config.name} cannot use measured sinograms: take their source alone")
            if share and not len(sources[name]["train"].source):
                raise DataError(f"{nothing_for('train', source)}, or share=0")
        except UserError as error:
            raise type(error)(f"{error} ({section})") from error
    train = [parts["train"] for parts in sources.values()]
    counts = counts_of(list(config.shares.values()), [len(part.source) for part in train])
    for (name, share), count in zip(config.shares.items(), counts, strict=True):
        if share and not count:
            raise DataError(f"data.sources.{name}.share={share} gives no slice in an epoch of {sum(counts)}: raise it")

    def mix(slices: list[SliceSource]) -> MixedSource:
        return MixedSource(slices, counts, seed=config.seed)

    fine = [part.fine for part in train if part.fine is not None]
    mixed = Part(mix([part.source for part in train]), fine=mix(fine) if fine else None)
    return {**sources[config.evaluate_on], "train": mixed}


class MixedSource:
    """A fixed number of slices per epoch from each of several sources, evenly interleaved.

    Slice n is in epoch n // length. The number n alone decides which slice it is: no process or worker can change that.
    An endless source gives new slices in each epoch. Slices of any other source are repeated in a new order each time.

    Args:
        sources: slices [S, S] in HU.
        counts: slices of each source in an epoch; 0 for an empty source.
        seed: of the orders.
    """

    endless = True

    def __init__(self, sources: Sequence[SliceSource], counts: Sequence[int], *, seed: int) -> None:
        self.sources, self.counts, self.seed = sources, counts, seed
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count])
        order = np.argsort(places, kind="stable")
        self._source = np.repeat(np.arange(len(counts)), counts)[order]  # of each slice of an epoch
        self._number = np.concatenate([np.arange(count) for count in counts])[order]  # within its source's part

    def __len__(self) -> int:
        return len(self._source)

    def load(self, index: int) -> FloatArray:
        """Slice [S, S] in HU."""
        k, of_source = self.place(index)
        return self.sources[k].load(of_source)

    def name(self, index: int) -> str:
        """The name that its source gives."""
        k, of_source = self.place(index)
        return self.sources[k].name(of_source)

    def place(self, index: int) -> tuple[int, int]:
        """The number of a slice's source, and its index there."""
        epoch, slot = divmod(index, len(self))
        k = int(self._source[slot])
        source, number = self.sources[k], epoch * self.counts[k] + int(self._number[slot])
        if source.endless:
            return k, number
        if self.counts[k] == len(source):
            return k, number % len(source)  # every epoch has all of them; the sampler sets their order
        turn, place = divmod(number, len(source))
        return k, int(np.random.default_rng([self.seed, k, turn, 0x313D]).permutation(len(source))[place])


def counts_of(shares: Sequence[float], lengths: Sequence[int]) -> list[int]:
    """Slices of each source in an epoch. The first source with a share is used exactly once; shares add up to 1."""
    length = next(round(n / share) for share, n in zip(shares, lengths, strict=True) if share)
    ends = [round(length * end) for end in np.cumsum(shares)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
