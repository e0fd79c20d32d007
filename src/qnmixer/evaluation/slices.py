"""Which slices a run is measured on, and which of them are drawn or kept to look through."""

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from qnmixer.config import Config
from qnmixer.config.data import AsTrained, DataConfig, FolderData, MixedData, PhantomData
from qnmixer.config.option import check_bounds
from qnmixer.config.overrides import values_of
from qnmixer.errors import CheckpointError
from qnmixer.plugins import check_trusted
from qnmixer.reports.page import PageSlice
from qnmixer.weights import SUFFIX, located

_ROOM = 12 * 2**20
"""Bytes of pixels, before they are compressed, of a page's slices; those in full come on top."""
_SMALLEST = 64
"""Pixels: smaller than this no slice is kept; there are fewer of them instead."""
_N_WORST = 3
"""Slices that are kept in full because they are the worst."""


def as_trained(run: str, changed: AsTrained, data: DataConfig, trust: Collection[str] = ()) -> DataConfig:
    """The run's own slices, but for what an evaluation may ask of them.

    Raises CheckpointError for weights files of slices from files, as these say nothing of the folder, and PluginError
    for slices of a class that lies in no module of `trust`.
    """
    for source in data.by_section().values():
        if located(run).suffix == SUFFIX and not isinstance(source, PhantomData):
            where = [*source.choice(), *(["data.root=FOLDER"] if isinstance(source, FolderData) else [])]
            raise CheckpointError(f"{run} does not say where its slices are: give {' '.join(where)}")
    check_trusted(run, data.targets(), trust)
    changes = {key: value for key, value in vars(changed).items() if key != "_target_" and value is not None}
    data = replace(data, **changes)
    for source in data.by_section().values():
        check_bounds("data.", source)
    return data


def other_slices(data: DataConfig, trained: Config, overrides: list[str]) -> tuple[DataConfig, bool]:
    """Slices that the run was not trained on, as its network needs them; all of them, unless told otherwise.

    And whether they are the run's own after all, of which its split tells those to test.
    """
    given = values_of(overrides)
    fixed = {key: getattr(trained.data, key) for key in ("image_size", "scaling", "hu_max")}
    for key, value in fixed.items():
        if f"data.{key}" in given and getattr(data, key) != value:
            raise CheckpointError(
                f"the run was trained with data.{key}={value}: leave data.{key} out, or train another"
            )
    data = replace(data, **fixed, seed=trained.data.seed)
    if isinstance(data, FolderData) and "data.split" not in given:
        for source in trained.data.by_section().values():
            if isinstance(source, FolderData) and _folder(data) == _folder(source):
                # or slices that it was trained on would be measured
                return replace(source, simulation_factor=data.simulation_factor, disc=data.disc), True
        data = replace(data, split="all")
    data.check(trained)
    return data, False


def kind_of(data: DataConfig) -> str:
    """The source of validation and test slices: dicom, say; mixed where they are of several."""
    if isinstance(data, MixedData) and data.evaluate_on is not None:
        return data.by_section()[f"data.sources.{data.evaluate_on}"].name
    return data.name


def _folder(data: FolderData) -> Path:
    return Path(str(data.root)).expanduser().resolve()


def pictured(n_images: int, n_pictures: int) -> set[int]:
    """Which images to draw: spread over the split, since neighbours look alike."""
    n = min(n_pictures, n_images)
    return {(2 * k + 1) * n_images // (2 * n) for k in range(n)}


class Gallery:
    """The slices of a test that its page has, whatever their number.

    In full, with every x_t, are the pictured ones, the worst ones, and all of them where there is room. Of the others
    x_T alone is kept, and smaller where there are many. Beyond that room the best ones are left out.

    Args:
        n_images: of the test.
        n_pictures: how many of them go into the picture.
        size: of a slice, in pixels.
        n_methods: that a slice is reconstructed by.
        n_iterates: images of a slice by the last method, x_0 … x_T.
    """

    def __init__(self, n_images: int, n_pictures: int, size: int, n_methods: int, n_iterates: int) -> None:
        self.pictured = pictured(n_images, n_pictures)
        room = _ROOM // (2 * max(1, n_images))  # pixels for each
        n_last = 1 + n_methods  # with the truth
        self._all_in_full = (n_last - 1 + n_iterates) * size**2 <= room
        factor = math.ceil(size / max(_SMALLEST, math.isqrt(room // n_last)))  # whole, or pixels would differ in size
        self._size = size // max(1, factor)
        self._most = max(_N_WORST, _ROOM // (2 * n_last * self._size**2))
        self._slices: dict[int, PageSlice] = {}

    def add(self, number: int, slice_: PageSlice) -> None:
        """Keep a slice, whose PSNR is that of the last method; make another smaller, or drop it, for its place."""
        self._slices[number] = slice_
        others = [n for n in self._worst_first() if n not in self.pictured]
        if not self._all_in_full:
            self._slices |= {n: _smaller(self._slices[n], self._size) for n in others[_N_WORST:]}
        for n in others[self._most :]:
            del self._slices[n]

    def merge(self, slices: dict[int, PageSlice]) -> None:
        """Those of another process too."""
        for number, slice_ in slices.items():
            self.add(number, slice_)

    @property
    def found(self) -> dict[int, PageSlice]:
        """By their numbers, the worst first."""
        return {n: self._slices[n] for n in self._worst_first()}

    def _worst_first(self) -> list[int]:
        def psnr(number: int) -> float:
            value = self._slices[number].psnr
            return -math.inf if value is None or math.isnan(value) else value

        return sorted(self._slices, key=lambda number: (psnr(number), number))


def _smaller(slice_: PageSlice, size: int) -> PageSlice:
    """What each method ends with, averaged down to [size, size] where it is larger."""

    def pooled(image: Tensor) -> Tensor:
        return adaptive_avg_pool2d(image[None], size)[0] if image.shape[0] > size else image

    image = slice_.methods[-1].iterates[-1]
    return replace(
        slice_,
        truth=None if slice_.truth is None else pooled(slice_.truth),
        methods=[replace(method, iterates=[pooled(method.iterates[-1])]) for method in slice_.methods],
        full_shape=(image.shape[0], image.shape[1]) if image.shape[0] > size else slice_.full_shape,
    )
