"""The slices of an evaluation, and which of them are drawn or stored for the page."""

import math
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from qnmixer.engine.config import Config
from qnmixer.engine.config.data import (
    LOADING,
    AsTrained,
    DataConfig,
    FolderData,
    MixedData,
    PairData,
    PhantomData,
)
from qnmixer.engine.config.overrides import values_of
from qnmixer.engine.config.target import keys_of
from qnmixer.engine.plugins import check_trusted
from qnmixer.engine.reports.page import PageSlice
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.weights import SUFFIX, located

_ROOM = 12 * 2**20
"""Bytes of a page's pixels before compression. Slices that are stored in full come on top."""
_SMALLEST = 64
"""Pixels. No slice is made smaller than this; the page then has fewer slices."""
_OF_TEST = "simulation_factor", "disc"
"""Keys that turn the run's own slices into another test."""
_N_WORST = 3
"""So many of the worst slices are stored in full."""


def as_trained(run: str, changed: AsTrained, data: DataConfig, trust: Collection[str] = ()) -> DataConfig:
    """The run's own slices, with the changes that an evaluation may ask for.

    Raises CheckpointError for a weights file that was trained on files, because it does not name their folder. Also for
    data.root, if the run had no folder or several. Raises PluginError if the class of the slices is in no module of
    `trust`.
    """
    for source in data.by_section().values():
        if located(run).suffix == SUFFIX and not isinstance(source, PhantomData):
            where = [*source.choice(), *(["data.root=FOLDER"] if isinstance(source, FolderData | PairData) else [])]
            raise CheckpointError(f"{run} does not say where its slices are: give {' '.join(where)}")
    check_trusted(run, data.targets(), trust)
    if changed.root is not None and not isinstance(data, FolderData | PairData):
        raise CheckpointError(
            f"data.root={changed.root} is for a run on one folder, but {run} was trained with data={data.name}: leave "
            "it out, or choose other slices with data=dicom too"
        )
    changes = {key: value for key, value in vars(changed).items() if key != "_target_" and value is not None}
    return replace(data, **changes)


def other_slices(data: DataConfig, trained: Config, overrides: list[str]) -> tuple[DataConfig, bool]:
    """Slices that the run was not trained on, in the form that its network needs; all of them, if no split is given.

    Also returns whether they are the run's own slices after all; then its split says which are test slices. Raises
    ConfigError for a key that would change these, and CheckpointError for one that the network cannot use.
    """
    given, asked = values_of(overrides), keys_of(data)
    of_set = {"max_attenuation"} & data.arguments.keys() & trained.data.arguments.keys()
    fixed = {key: getattr(trained.data, key) for key in ("image_size", "scaling", "hu_max", *of_set)}
    for key, value in fixed.items():
        if f"data.{key}" in given and getattr(data, key) != value:
            raise CheckpointError(
                f"the run was trained with data.{key}={value}: leave data.{key} out, or train another network"
            )
    seed = data.seed if "data.seed" in given else trained.data.seed
    data = data.changed(**{key: fixed.pop(key) for key in of_set})
    data = replace(data, **fixed, seed=seed)
    if isinstance(data, FolderData) and "data.split" not in given:
        for source in trained.data.by_section().values():
            if isinstance(source, FolderData) and _folder(data) == _folder(source):
                # else the evaluation would use slices that the network was trained on
                changed = [*_OF_TEST, *(key for key in ("pixel_size", *LOADING) if f"data.{key}" in given)]
                own = replace(source, **{key: getattr(data, key) for key in changed})
                for key, value in asked.items():
                    if f"data.{key}" in given and key != "root" and value != (its := keys_of(own).get(key)):
                        raise ConfigError(
                            f"data.root={data.root} is the run's own folder, whose slices have data.{key}={its}: "
                            f"leave out data.{key}, or give data.split=all too for other slices of the folder"
                        )
                return own, True
        data = replace(data, split="all")
    if isinstance(data, FolderData) and "data.pixel_size" not in given and trained.data.at_true_size:
        if data.name in ("dicom", *(it.name for it in trained.data.by_section().values() if it.at_true_size)):
            data = replace(data, pixel_size="header")
        else:
            warnings.warn(
                f"each slice of data={data.name} is taken to be {trained.geometry.field_of_view:g} mm wide: "
                "data.pixel_size=header, as in the run, needs files with a pixel size",
                stacklevel=1,
            )
    data.check(trained)
    return data, False


def kind_of(data: DataConfig) -> str:
    """The source of validation and test slices, as "dicom"; "mixed" if there are several."""
    if isinstance(data, MixedData) and data.evaluate_on is not None:
        return data.by_section()[f"data.sources.{data.evaluate_on}"].name
    return data.name


def _folder(data: FolderData) -> Path:
    return Path(str(data.root)).expanduser().resolve()


def pictured(n_images: int, n_pictures: int) -> set[int]:
    """The indices of the images to draw. They are spread over the split, because neighbours look alike."""
    n = min(n_pictures, n_images)
    return {(2 * k + 1) * n_images // (2 * n) for k in range(n)}


class Gallery:
    """The slices of a test that its page stores. Their number is limited.

    The pictured slices and the worst ones are stored in full, with every x_t; all slices are, if there is room. Of the
    others only x_T is stored, smaller if there are many. If there is still too little room, the best ones are dropped.

    Args:
        n_images: of the test.
        n_pictures: how many of them are in the picture.
        size: of a slice, in pixels.
        n_methods: methods that reconstruct each slice.
        n_iterates: images of a slice by the last method, x_0 … x_T.
    """

    def __init__(self, n_images: int, n_pictures: int, size: int, n_methods: int, n_iterates: int) -> None:
        self.pictured = pictured(n_images, n_pictures)
        room = _ROOM // (2 * max(1, n_images))  # pixels for each
        n_last = 1 + n_methods  # plus the truth
        self._all_in_full = (n_last - 1 + n_iterates) * size**2 <= room
        factor = math.ceil(size / max(_SMALLEST, math.isqrt(room // n_last)))  # whole: all pixels have one size
        self._size = size // max(1, factor)
        self._most = max(_N_WORST, _ROOM // (2 * n_last * self._size**2))
        self._slices: dict[int, PageSlice] = {}

    def add(self, number: int, slice_: PageSlice) -> None:
        """Store a slice with the PSNR of the last method. To make room, another one is made smaller or dropped."""
        self._slices[number] = slice_
        others = [n for n in self._worst_first() if n not in self.pictured]
        if not self._all_in_full:
            self._slices |= {n: _smaller(self._slices[n], self._size) for n in others[_N_WORST:]}
        for n in others[self._most :]:
            del self._slices[n]

    def merge(self, slices: dict[int, PageSlice]) -> None:
        """Add the slices of another process."""
        for number, slice_ in slices.items():
            self.add(number, slice_)

    @property
    def found(self) -> dict[int, PageSlice]:
        """The stored slices by number, the worst first."""
        return {n: self._slices[n] for n in self._worst_first()}

    def _worst_first(self) -> list[int]:
        def psnr(number: int) -> float:
            value = self._slices[number].psnr
            return -math.inf if value is None or math.isnan(value) else value

        return sorted(self._slices, key=lambda number: (psnr(number), number))


def _smaller(slice_: PageSlice, size: int) -> PageSlice:
    """The final image of each method, averaged down to [size, size] if it is larger."""

    def pooled(image: Tensor) -> Tensor:
        return adaptive_avg_pool2d(image[None], size)[0] if image.shape[0] > size else image

    image = slice_.methods[-1].iterates[-1]
    return replace(
        slice_,
        truth=pooled(slice_.truth),
        methods=[replace(method, iterates=[pooled(method.iterates[-1])]) for method in slice_.methods],
        full_shape=(image.shape[0], image.shape[1]) if image.shape[0] > size else slice_.full_shape,
    )
