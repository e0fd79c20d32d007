"""LoDoPaB-CT and 2DeteCT in small: files of the exact layout, of discs whose line integrals are known."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qnmixer.physics import FanBeamGeometry

Disc = tuple[float, float, float, float]
"""x to the right, y upwards, radius, value."""
LODOPAB_VIEWS, TWO_DETECT_VIEWS = 1000, 3600
PIXEL, DARK, LIGHT = 0.113797, 200.0, (50000.0, 50600.0)


def discs(seed: int, reach: float, value: float) -> list[Disc]:
    """A body and three discs in it, values about as large as given; `reach`: radius of the body."""
    rng = np.random.default_rng(seed)
    inner = [
        (*rng.uniform(-0.45, 0.45, 2) * reach, rng.uniform(0.1, 0.3) * reach, rng.uniform(0.2, 0.6) * value)
        for _ in range(3)
    ]
    return [(0.0, 0.0, reach, 0.4 * value), *inner]


def image_of(objects: Sequence[Disc], size: int, width: float, *, fine: int = 3) -> np.ndarray[Any, Any]:
    """Pixels [size, size] of a square of this width; those on a rim have their share."""
    axis = (np.arange(size * fine) + 0.5) * width / (size * fine) - width / 2
    x, y = axis[None, :], -axis[:, None]
    image = np.zeros((size * fine, size * fine), np.float32)
    for left, up, radius, value in objects:
        image += np.float32(value) * ((x - left) ** 2 + (y - up) ** 2 < radius**2)
    return image.reshape(size, fine, size, fine).mean((1, 3))


def integrals_of(objects: Sequence[Disc], geometry: FanBeamGeometry) -> np.ndarray[Any, Any]:
    """Exact line integrals [V, D]."""
    angle, distance = geometry.angles()[:, None] - geometry.fan_angles(), geometry.ray_distances()
    total = np.zeros(angle.shape)
    for x, y, radius, value in objects:
        off = distance - (x * np.cos(angle) + y * np.sin(angle))
        total += 2 * value * np.sqrt(np.maximum(radius**2 - off**2, 0))
    return total


def write_lodopab(
    root: Path, geometry: FanBeamGeometry, counts: Mapping[str, int], *, spare: int = 3, per_file: int = 128
) -> None:
    """Files of train, validation and test, with `counts` images each; the last images have `spare` rows too many.

    Only the views of the geometry are there: the others are of zeros.
    """
    import h5py

    root.mkdir(parents=True, exist_ok=True)
    step = LODOPAB_VIEWS // geometry.n_views
    for part, count in counts.items():
        for number, first in enumerate(range(0, count, per_file)):
            n = min(per_file, count - first)
            rows = n + (spare if first + n == count else 0)
            with h5py.File(root / f"ground_truth_{part}_{number:03d}.hdf5", "w") as stream:
                images = stream.create_dataset("data", (rows, 362, 362), "f4", chunks=True)
                for k in range(n):
                    images[k] = image_of(discs(first + k, 110.0, 0.8), 362, 260.0)
                images[n:] = 7.0
            with h5py.File(root / f"observation_{part}_{number:03d}.hdf5", "w") as stream:
                views = stream.create_dataset("data", (n, LODOPAB_VIEWS, 513), "f4", chunks=True)
                for k in range(n):
                    views[k, ::step] = integrals_of(discs(first + k, 110.0, 0.8), geometry) / 1000


def write_two_detect(
    root: Path, references: Path, geometry: FanBeamGeometry, numbers: Sequence[int], *, modes: Sequence[int] = (1, 2)
) -> None:
    """Slices of raw counts, and their references of mode 2. Views that the geometry lacks are dark."""
    import tifffile

    step = TWO_DETECT_VIEWS // geometry.n_views
    for number in numbers:
        objects = discs(number, 45.0, 0.05)
        transmission = np.exp(-integrals_of(objects, geometry))
        if number <= 2830 or 5521 <= number <= 5870:  # the detector stood one bin away
            transmission = np.concatenate([transmission[:, :1], transmission[:, :-1]], axis=1)
        rng = np.random.default_rng(number)
        dark, *flats = (level * rng.uniform(0.9, 1.1, 956) for level in (DARK, *LIGHT))
        counts = np.tile(dark, (TWO_DETECT_VIEWS + 1, 1))
        counts[:TWO_DETECT_VIEWS:step] += transmission * (np.mean(flats, axis=0) - dark)
        for mode in modes:
            folder = root / f"slice{number:05d}" / f"mode{mode}"
            folder.mkdir(parents=True, exist_ok=True)
            parts = {"sinogram": counts, "dark": dark[None], "flat1": flats[:1], "flat2": flats[1:]}
            for name, values in parts.items():
                raw = np.repeat(np.asarray(values), 2, axis=1).round().astype(np.uint16)
                tifffile.imwrite(folder / f"{name}.tif", raw)
        folder = references / f"slice{number:05d}" / "mode2"
        folder.mkdir(parents=True, exist_ok=True)
        moved = np.zeros((1024, 1024), np.float32)
        moved[1:, 1:] = image_of(objects, 1024, 116.528, fine=2)[:-1, :-1] * PIXEL
        tifffile.imwrite(folder / "reconstruction.tif", moved)


def write_helix2fan(
    path: Path, geometry: FanBeamGeometry, seeds: Sequence[int], *, water: float = 0.0192, **keys: Any
) -> None:
    """A file as helix2fan writes it, a slice for each seed: discs of water and more, half as wide as the image.

    `geometry`: the rays of all views. `keys`: other values in the description.
    """
    import tifffile

    objects = [discs(seed, geometry.field_of_view / 4, 2.5 * water) for seed in seeds]
    values = np.stack([integrals_of(its, geometry)[:, ::-1] for its in objects], axis=-1).astype(np.float32)
    its = {
        "path_dicom": "/a/patient's folder", "scan_id": "scan_001", "nu": geometry.n_detectors,
        "du": geometry.detector_pitch, "dso": geometry.source_to_axis, "ddo": geometry.axis_to_detector,
        "rotview": geometry.n_views, "hu_factor": water,
        "angles": (-np.tile(geometry.angles(), 2) - np.pi / 2).tolist(),  # those of two turns of the helix
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, shape=values.shape, dtype=values.dtype, metadata=its | keys)
    tifffile.memmap(path)[:] = values
