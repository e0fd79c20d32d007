"""2DeteCT: measured fan-beam CT of mixed objects in TIFF (Kiss et al., Scientific Data 2023).

Sinograms are converted to line integrals like in the authors' script, which made their reference images.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le

from qnmixer.engine.data.pairs import optional, views_of
from qnmixer.engine.data.resample import to_square
from qnmixer.engine.data.scaling import FixedScaling
from qnmixer.engine.data.slices import FloatArray, SkipFile, reading, summarise_skipped
from qnmixer.errors import DataError
from qnmixer.files import atomic_file, default_cache_dir, digest, digest_of_bytes
from qnmixer.physics import FanBeamGeometry

_PARTS = {"train": range(1, 3931), "val": range(3931, 4481), "test": range(4531, 5001)}
"""Slices of the benchmark's splits, by whole samples; 4481 to 4530 are in none."""
_MOVED = range(1, 2831), range(5521, 5871)
"""Slices whose detector was shifted by one (binned) bin."""
_VIEWS, _RAW_BINS, _SIZE = 3600, 1912, 1024
_RAW = "sinogram.tif", "dark.tif", "flat1.tif", "flat2.tif"
_REFERENCE = "reconstruction.tif"
_PIXEL = 0.113797
"""Millimetres of the references, whose values are attenuation per pixel."""
_LEAST = 1e-6
"""The transmission of a ray without any light."""
_DEAD = 1e-3
"""Share of the median light; a bin with less is dead."""
_N_LOOKED_AT = 4
_FORMAT = 1
_NUMBER = np.dtype("<f4")


class TwoDetectSource:
    """One split of the set: references of mode 2 as images, and sinograms [V, 956] of a mode at the scan's views.

    A slice is decoded when it is first used. The part that the scan needs is then cached.

    Args:
        part: train, val or test, as in the benchmark.
        image_size: rows and columns that references are resampled to; in the files they have 1024.
        geometry: the scan.
        hu_max: HU of x = 1; air is −1000.
        root: folder with slice00001/mode1/sinogram.tif and so on, at most two folders down.
        reference_root: folder with slice00001/mode2/reconstruction.tif and so on; None: root.
        mode: of the sinograms.
        max_attenuation: 1/mm of x = 1.
        leave_out: numbers of slices to skip.
        cache_dir: folder of the cache; None: the default folder.

    Raises:
        DataError: tifffile is missing, or there is no slice.
        ConfigError: the scan has views that were not measured.
    """

    endless = False

    def __init__(
        self,
        part: str,
        image_size: int,
        geometry: FanBeamGeometry,
        hu_max: float,
        *,
        root: str,
        reference_root: str | None = None,
        mode: Annotated[int, Ge(1), Le(3)] = 2,
        max_attenuation: Annotated[float, Gt(0)] = 0.05,
        leave_out: Sequence[int] = (),
        cache_dir: str | None = None,
    ) -> None:
        optional("tifffile", "two_detect")
        self.image_size, self.mode, self.max_attenuation = image_size, mode, max_attenuation
        self.scaling = FixedScaling(-1000.0, hu_max + 1000.0)
        self._views = views_of(geometry, 0.0, 2 * np.pi / _VIEWS, _VIEWS, "two_detect")
        raw, references = Path(root).expanduser(), Path(reference_root or root).expanduser()
        files = _Files(raw, references, mode)
        wanted = [number for number in _PARTS[part] if number in files.numbers and number not in {*leave_out}]
        missing = {number: files.missing(number) for number in wanted}
        self._numbers = [number for number in wanted if missing[number] is None]
        self._files = {number: files.of(number) for number in self._numbers}
        self.warnings: list[str] = []
        if skipped := [(f"slice{n:05d}", f"without {file}") for n, file in missing.items() if file is not None]:
            self.warnings.append(summarise_skipped(str(root), skipped))
        what = [_FORMAT, str(raw.resolve()), str(references.resolve()), mode, image_size, self._views]
        cache = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self._cache = cache / f"{raw.resolve().name}-two_detect-{image_size}-{digest(what)}"
        self._last: tuple[int, FloatArray, FloatArray] | None = None
        if part == "train":
            self.warnings += self._about_scale()

    def __len__(self) -> int:
        return len(self._numbers)

    def load(self, index: int) -> FloatArray:
        """Reference [S, S] with HU = −1000 + (hu_max + 1000)·x. Raises DataError if it cannot be used."""
        attenuation = self._pair(index)[0]
        return np.float32(self.scaling.offset) + attenuation * np.float32(self.scaling.scale / self.max_attenuation)

    def sinogram(self, index: int) -> FloatArray:
        """Sinogram [V, 956], value × mm. Raises DataError if it cannot be used."""
        return self._pair(index)[1] / np.float32(self.max_attenuation)

    def name(self, index: int) -> str:
        """The folder of the slice, as slice00001."""
        return f"slice{self._numbers[index]:05d}"

    def __getstate__(self) -> dict[str, Any]:
        """Give workers no pixels."""
        return {**self.__dict__, "_last": None}

    def _pair(self, index: int) -> tuple[FloatArray, FloatArray]:
        """Reference [S, S] in 1/mm and line integrals [V, 956]: from the cache if it has them."""
        if self._last is None or self._last[0] != index:
            self._last = (index, *self._kept(self._numbers[index]))
        return self._last[1:]

    def _kept(self, number: int) -> tuple[FloatArray, FloatArray]:
        files = self._files[number]
        stats = [[it.stat().st_size, it.stat().st_mtime_ns, it.stat().st_ctime_ns] for it in files.values()]
        kept = self._cache / f"slice{number:05d}-{digest(stats)}.bin"
        length = self.image_size**2
        content = kept.read_bytes() if kept.is_file() else b""
        if len(content) < 8 or digest_of_bytes(content[8:]) != int.from_bytes(content[:8]):
            image, line_integrals = self._decoded(number)
            numbers = np.concatenate([image.ravel(), line_integrals.ravel()]).astype(_NUMBER).tobytes()
            content = digest_of_bytes(numbers).to_bytes(8) + numbers
            for old in self._cache.glob(f"slice{number:05d}-*.bin"):
                old.unlink(missing_ok=True)
            with atomic_file(kept) as stream:
                stream.write(content)
        values = np.frombuffer(content, _NUMBER, offset=8)
        return values[:length].reshape(self.image_size, -1), values[length:].reshape(len(self._views), -1)

    def _decoded(self, number: int) -> tuple[FloatArray, FloatArray]:
        file = ""
        try:
            arrays = {}
            for file, path in self._files[number].items():
                arrays[file] = _read(path)
            file = _REFERENCE
            image = to_square(_reference(arrays[file]), self.image_size)
            file = "sinogram.tif"
            moved = any(number in its for its in _MOVED)
            sinogram, dark, *flats = (arrays[name] for name in _RAW)
            return image, line_integrals(sinogram, dark, flats, self._views, moved=moved)
        except SkipFile as reason:
            raise DataError(
                f"{self._files[number][file]} cannot be used ({reason}): copy it again, or leave it out with "
                f"data.leave_out=[{number}]"
            ) from None

    def _about_scale(self) -> list[str]:
        """Warn if the references of some slices are far from x = 0 … 1."""
        some = [self._numbers[len(self) * k // _N_LOOKED_AT] for k in range(min(_N_LOOKED_AT, len(self)))]
        try:
            references = [_reference(_read(self._files[number][_REFERENCE])) for number in some]
        except SkipFile:  # reported when the slice is used
            return []
        densest = max((float(np.percentile(it, 99.9)) for it in references), default=self.max_attenuation)
        if 0.4 < densest / self.max_attenuation < 1.5:
            return []
        return [
            f"the densest 0.1 % of {len(some)} training references are at {densest:.3g} /mm, but x = 1 is at "
            f"{self.max_attenuation:g}: set data.max_attenuation={densest:.2g}"
        ]


class _Files:
    """The files of each slice. Raw data and references may be in one folder or in two."""

    def __init__(self, raw: Path, references: Path, mode: int) -> None:
        self._places = {name: (_folders(raw), f"mode{mode}") for name in _RAW}
        self._places[_REFERENCE] = (_folders(references), "mode2")
        self.numbers = {*self._places[_RAW[0]][0]}
        if not self.numbers:
            raise DataError(
                f"data.root={raw} has no folder slice00001 or the like, two folders down at most: unzip 2DeteCT there"
            )

    def of(self, number: int) -> dict[str, Path]:
        """The existing files of a slice, by name."""
        found = {}
        for name, (folders, mode) in self._places.items():
            for folder in folders.get(number, ()):
                if (path := folder / mode / name).is_file():
                    found[name] = path
                    break
        return found

    def missing(self, number: int) -> str | None:
        """The first missing file of a slice."""
        found = self.of(number)
        return next((f"{mode}/{name}" for name, (_, mode) in self._places.items() if name not in found), None)


def _folders(root: Path) -> dict[int, list[Path]]:
    """The folders of each slice, by its number. A slice has several if archives were unpacked side by side."""
    found: dict[int, list[Path]] = {}
    for level in ("", "*/", "*/*/"):
        for folder in sorted(root.glob(f"{level}slice[0-9][0-9][0-9][0-9][0-9]")):
            found.setdefault(int(folder.name[-5:]), []).append(folder)
        if found:
            break
    return found


def _read(path: Path) -> np.ndarray[Any, Any]:
    """The values of a TIFF. Raises SkipFile if it is not one."""
    with reading("unreadable or truncated TIFF"):
        values = np.asarray(optional("tifffile", "two_detect").imread(path))
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise SkipFile("values that are no finite numbers")
    return values


def _binned(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Add neighbouring pixels of the detector in pairs, as the authors intend: [..., 1912] → [..., 956]."""
    return values.reshape(*values.shape[:-1], -1, 2).sum(axis=-1, dtype=np.float64)


def line_integrals(
    sinogram: np.ndarray[Any, Any],
    dark: np.ndarray[Any, Any],
    flats: Sequence[np.ndarray[Any, Any]],
    views: Sequence[int],
    *,
    moved: bool,
) -> FloatArray:
    """−log of transmission [V, 956] of some views of raw counts.

    Args:
        sinogram: counts [3601, 1912]; the last view repeats the first.
        dark: counts without X-rays [1912].
        flats: counts without an object [1912], before and after.
        views: indices into the 3600 views.
        moved: whether the detector was shifted by one bin in this slice.

    Raises:
        SkipFile: another size, or a detector without light.
    """
    if sinogram.shape not in ((_VIEWS + 1, _RAW_BINS), (_VIEWS, _RAW_BINS)):
        raise SkipFile(f"{[*sinogram.shape]} values, not [{_VIEWS + 1}, {_RAW_BINS}]")
    if wrong := [it for it in (dark, *flats) if it.size != _RAW_BINS]:
        raise SkipFile(f"a dark or flat field beside it has {wrong[0].size} values, not {_RAW_BINS}")
    none, *full = (_binned(it.reshape(_RAW_BINS)) for it in (dark, *flats))
    light = np.mean(full, axis=0) - none
    if np.median(light) <= 0:
        raise SkipFile("dark.tif beside it is brighter than the flat fields")
    if (dead := np.flatnonzero(light <= _DEAD * np.median(light))).size:
        raise SkipFile(
            f"{dead.size} detector bins see no light in the flat fields, the first is {dead[0]} of {len(light)}"
        )
    transmission = (_binned(sinogram[[*views]]) - none) / light
    if moved:
        last = 2 * transmission[:, -1:] - transmission[:, -2:-1]
        transmission = np.concatenate([transmission[:, 1:], last], axis=1)
    return -np.log(np.maximum(transmission, _LEAST)).astype(np.float32)


def _reference(values: np.ndarray[Any, Any]) -> FloatArray:
    """A reference in 1/mm on the pixels of the scan. The set's own pixels are shifted by one, down and to the right."""
    if values.shape != (_SIZE, _SIZE):
        raise SkipFile(f"{[*values.shape]} values, not [{_SIZE}, {_SIZE}]")
    moved = np.zeros((_SIZE, _SIZE), np.float32)
    moved[:-1, :-1] = values[1:, 1:] / np.float32(_PIXEL)
    return moved
