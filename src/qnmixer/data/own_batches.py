"""The batches of a user's loader: what they lack is added, and what would spoil a run is refused."""

import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from qnmixer.data.batch import SHAPES
from qnmixer.data.slices import DENSEST, NO_AIR, warn_once
from qnmixer.errors import DataError
from qnmixer.physics import FanBeamGeometry
from qnmixer.settings.data import DataConfig

_LEAST_DENSE = -3500.0
"""HU, between the lowest padding of scanners (−3024) and the air of images that were scaled to −1 to 1 (−4000)."""


def content_of(batch: Mapping[str, Any]) -> Any:
    """What tells the slices of a batch from others: their images, or their sinograms if there are none."""
    return batch["image"] if "image" in batch else batch["sinogram"]


class OwnBatches:
    """Completes and checks the batches of one part, in the order in which its loader gives them."""

    def __init__(
        self,
        name: str,
        part: str,
        config: DataConfig,
        geometry: FanBeamGeometry,
        loader: Any = None,  # the user's; None if it is not known
        device: int | None = None,  # the number of this one, if each gets other batches
    ) -> None:
        self.name, self.part, self.config, self.geometry, self.device = name, part, config, geometry, device
        self.weight = 0.0  # sum of the weights of all slices so far
        is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        self._n_workers = loader.num_workers if is_stream else 0  # each of them iterates over the whole stream
        self._n_batches = 0
        self._first: list[int] = []  # digests of the images of the first batch
        self._pass: Hashable = None
        self._n_slices = 0  # of this pass over the loader

    def completed(self, batch: Any, epoch: int = 0, *, begun: Hashable = None) -> dict[str, Any]:
        """A `Batch` from what the loader gives next.

        The number of a sample is one of its pixels and the epoch, so noise is the same in each validation.

        Args:
            batch: a dict with image, sinogram or both, and any other keys of `SHAPES`; or a pair (image, sinogram).
            begun: differs between two passes over the loader, so that slices are counted from 0 in each.

        Raises:
            DataError: another kind of batch, a key of another shape, or values that are not finite, no HU, or no
                weights.
        """
        entries = self._shaped(batch)
        contents = [zlib.crc32(values.numpy(force=True).tobytes()) for values in content_of(entries)]
        digests, (offset, scale) = [epoch << 32 | content for content in contents], self.config.hu_scaling
        n = len(contents)
        complete = {
            "hu_offset": torch.full((n,), float(offset)),
            "hu_scale": torch.full((n,), float(scale)),
            "sample": torch.tensor(digests),
            "weight": torch.ones(n),
            "name": [f"{number:x}" for number in digests],
            **entries,
        }
        if self._pass != begun:
            self._pass, self._n_slices = begun, 0
        self._require_sound_values(complete, "name" in entries)
        if self._n_batches == 0:
            self._first = contents
            self._warn_of_air(complete)
        elif self._n_batches < self._n_workers and contents == self._first:
            warn_once(
                f"{self.name}.{self.part}_dataloader gives the same slices from each of its {self._n_workers} workers, "
                "so each slice counts several times: an IterableDataset divides itself among its workers, by "
                "torch.utils.data.get_worker_info()"
            )
            self._n_workers = 0  # said
        self._n_batches += 1
        self._n_slices += n
        self.weight += float(complete["weight"].sum())
        return complete

    # The form

    def _shaped(self, batch: Any) -> dict[str, Any]:
        """The entries of a batch, with their shapes checked, and numbers as float32."""
        if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
            batch = {"image": batch[0], "sinogram": batch[1]}
        if not isinstance(batch, Mapping) or not {"image", "sinogram"} & batch.keys():
            kind = type(batch).__name__
            if isinstance(batch, Mapping):
                kind += " without image and sinogram"
            elif isinstance(batch, Sequence):
                kind += f" of {len(batch)}"
            raise DataError(f"{self.name} gives a {kind}: give a dict with image or sinogram, or a pair of both")
        sizes: dict[str, int] = {
            "1": 1, "S": self.config.image_size, "V": self.geometry.n_views, "D": self.geometry.n_detectors,
        }  # fmt: skip
        return {**batch} | {key: self._of_shape(key, batch[key], sizes) for key in SHAPES if key in batch}

    def _of_shape(self, key: str, value: Any, sizes: dict[str, int]) -> Any:
        """The value of a key in its own type. Raises DataError for a shape that the sizes do not allow.

        `sizes`: by letter of `SHAPES`. Those that no key before had are set, as B by the image.
        """
        letters = SHAPES[key][1:-1].split(", ")
        # Names are a list. All else is a tensor: an array of NumPy would not be moved to the device.
        is_sized = isinstance(value, Tensor) or key == "name"
        shape = ([*value.shape] if isinstance(value, Tensor) else [len(value)]) if is_sized else []
        # A letter that stands twice, as f·S, has one size. So the first one sets it for the second.
        known = {**sizes}
        for letter, size in zip(letters, shape, strict=False):
            known.setdefault(letter, size)
        if not is_sized or shape != [known[letter] for letter in letters]:
            raise DataError(self._of_other_shape(key, value, shape if is_sized else None, sizes))
        sizes |= known
        if key == "name":
            return [*map(str, value)]
        if key != "sample":
            return value.float()
        if value.dtype.is_floating_point or value.dtype == torch.bool or bool((value < 0).any()):
            raise DataError(f"{self.name} gives sample {value.tolist()}, not integers from 0 on")
        return value.long()

    def _of_other_shape(self, key: str, value: Any, shape: list[int] | None, sizes: Mapping[str, int]) -> str:
        """The message for a value of another shape. `shape`: None for a value that has none."""
        wanted = ", ".join(str(sizes.get(letter, letter)) for letter in SHAPES[key][1:-1].split(", "))
        if not shape:
            what = f"as {type(value).__name__}, not a tensor" if shape is None else "[], not"
            return f"{self.name} gives {key} {what} [{wanted}]"
        remedies = {
            "image": f": set data.image_size={shape[-1]}",
            "sinogram": ": set geometry.n_views and geometry.n_detectors",
        }
        return f"{self.name} gives {key} {shape}, not [{wanted}]{remedies.get(key, '')}"

    # The values

    def _require_sound_values(self, batch: Mapping[str, Any], is_named: bool) -> None:
        """Raise DataError for values that are not finite, images that are no HU, and weights that are none."""
        ranges: dict[str, tuple[Tensor, Tensor]] = {}
        for key in SHAPES:
            if key in ("sample", "name") or key not in batch:
                continue
            # Reduced slice by slice, in one pass over the values. NaN stays NaN.
            value = batch[key]
            low, high = value.reshape(len(value), value[:1].numel()).aminmax(dim=1)
            if (bad := ~(low.isfinite() & high.isfinite())).any():
                raise DataError(f"{self.name} gives {key} with NaN or infinity {self._place(batch, bad, is_named)}")
            ranges[key] = low, high
        if (bad := ranges["weight"][0] < 0).any():
            place = self._place(batch, bad, is_named)
            raise DataError(f"{self.name} gives a weight below 0 {place}: give 0 for a slice that does not count")
        if (bad := ranges["hu_scale"][0] <= 0).any():
            raise DataError(f"{self.name} gives an hu_scale that is not above 0 {self._place(batch, bad, is_named)}")
        if "image" not in batch:
            return
        low, high = (batch["hu_offset"] + batch["hu_scale"] * end for end in ranges["image"])
        if (bad := (low < _LEAST_DENSE) | (high > DENSEST)).any():
            b = int(bad.int().argmax())
            offset, scale = float(batch["hu_offset"][b]), float(batch["hu_scale"][b])
            formula = f"(HU {'-' if offset > 0 else '+'} {abs(offset):g}) / {scale:g}"
            least, most = (float(end[b]) for end in ranges["image"])
            raise DataError(
                f"{self.name} gives an image from {least:.4g} to {most:.4g} {self._place(batch, bad, is_named)}, which "
                f"would be {low[b]:,.0f} to {high[b]:,.0f} HU: give {formula}, or other hu_offset and hu_scale"
            )

    def _warn_of_air(self, batch: Mapping[str, Any]) -> None:
        """Warn of a first batch that shows nothing but air, as images in another unit, such as attenuation, do."""
        if "image" not in batch:
            return
        hu = batch["hu_offset"] + batch["hu_scale"] * batch["image"].flatten(1).amax(1)
        if self.part != "predict" and float(hu.max()) < NO_AIR:
            warn_once(
                f"{self.name}: the first images of {self.part} are nothing but air (up to {float(hu.max()):g} HU): is "
                "image in the scale HU = hu_offset + hu_scale · image?"
            )

    def _place(self, batch: Mapping[str, Any], bad: Tensor, is_named: bool) -> str:
        """Where the first bad slice of a batch is. `bad`: [B] bool."""
        b = int(bad.int().argmax())
        # The order of training is that of its sampler, so the number is none of the dataset.
        order = " as drawn" if self.part == "train" else ""
        device = "" if self.device is None else f" of device {self.device}"
        name = f", {batch['name'][b]}" if is_named else ""
        return f"({self.part}, slice {self._n_slices + b}{order}{device}{name})"
