"""A LightningDataModule of the user's, as a run needs it: complete batches, shared by several devices."""

import zlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lightning import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from qnmixer.engine.config.data import DataConfig
from qnmixer.engine.data.dataset import scaling_of
from qnmixer.errors import DataError
from qnmixer.physics import FanBeamGeometry

NOT_PROMISED = (
    "not promised with them: that a resumed run goes on at the same slice (it does at the same step); that each slice "
    "counts once on several devices; that test slices are none of the training slices; a table after training"
)


class OwnDataModule(LightningDataModule):
    """Wraps any LightningDataModule whose loaders yield batches as dicts, or pairs (image, sinogram).

    A dict has image [B, 1, S, S], and may have the other keys of a `Batch`. What is missing is added. On several
    devices each gets its share of a DataLoader's dataset, as Lightning's own sampler shares it. An IterableDataset
    shares itself.

    Args:
        data_module: the user's.
        name: its target, for messages.
        config: the section `data`, for size and scaling of the images.
        geometry: the scan, for the size of sinograms.
    """

    measured = False  # nobody knows before the first batch

    def __init__(
        self, data_module: LightningDataModule, name: str, config: DataConfig, geometry: FanBeamGeometry
    ) -> None:
        super().__init__()
        self.data_module, self.name, self.config, self.geometry = data_module, name, config, geometry
        self.split = SimpleNamespace(record=None)  # nobody knows which slices it has
        self._ready: set[str | None] = set()

    def prepare_data(self) -> None:
        """Let the user's prepare its files; Lightning calls it on one process of a machine."""
        self.data_module.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up the user's, once for each stage."""
        if stage not in self._ready:
            self._ready.add(stage)
            self.data_module.trainer = self.trainer
            self.data_module.setup(stage or "fit")

    def teardown(self, stage: str) -> None:
        """Tear down the user's."""
        self._ready.discard(stage)
        self.data_module.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        """The state of the user's, for checkpoints."""
        return self.data_module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the user's its state back."""
        self.data_module.load_state_dict(state_dict)

    def train_dataloader(self) -> Any:
        """The user's training batches; on several devices the share of this one."""
        return self._share(self.data_module.train_dataloader(), "train_dataloader")

    def val_dataloader(self) -> Any:
        """The user's validation batches; on several devices the share of this one."""
        return self._share(self.data_module.val_dataloader(), "val_dataloader")

    def start_at(self, epoch: int, n_batches: int) -> None:
        """Do nothing: a loader of the user's starts where it starts."""

    def describe(self) -> str:
        """Whose batches these are, and what is not promised with them."""
        return f"batches of {self.name}; {NOT_PROMISED}"

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, Any]:
        """Complete a batch, on the host."""
        batch = self.data_module.on_before_batch_transfer(batch, dataloader_idx)
        epoch = self.trainer.current_epoch if self.trainer is not None and self.trainer.training else 0
        return self.completed(batch, epoch)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device, except its sample numbers, which the host reads."""
        entries = {name: value for name, value in batch.items() if name != "sample"}
        return self.data_module.transfer_batch_to_device(entries, device, dataloader_idx) | {"sample": batch["sample"]}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Let the user's change a batch on the device."""
        return self.data_module.on_after_batch_transfer(batch, dataloader_idx)

    def completed(self, batch: Any, epoch: int) -> dict[str, Any]:
        """A `Batch` from what a loader yields. Raises DataError for another kind or size of batch.

        The number of a sample is one of its pixels and the epoch, so noise is the same in each validation.
        """
        if isinstance(batch, Sequence) and len(batch) == 2:
            batch = {"image": batch[0], "sinogram": batch[1]}
        if not isinstance(batch, Mapping) or not isinstance(batch.get("image"), Tensor):
            kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, Sequence) else type(batch).__name__
            raise DataError(f"{self.name} gives a {kind}: give a dict with image, or a pair (image, sinogram)")
        entries = {name: value.float() if name in _SIZED else value for name, value in batch.items()}
        size, scan = self.config.image_size, self.geometry
        self._require_size("image", entries["image"], (size, size), f"set data.image_size={entries['image'].shape[-1]}")
        n = len(entries["image"])
        if "sinogram" in entries:
            shape = (scan.n_views, scan.n_detectors)
            self._require_size("sinogram", entries["sinogram"], shape, "set geometry.n_views and geometry.n_detectors")
        offset, scale = scaling_of(self.config, entries["image"][:1].numpy(force=True))
        digests = [epoch << 32 | zlib.crc32(image.numpy(force=True).tobytes()) for image in entries["image"]]
        return {
            "hu_offset": torch.full((n,), float(offset)),
            "hu_scale": torch.full((n,), float(scale)),
            "sample": torch.tensor(digests),
            "weight": torch.ones(n),
            "name": [f"{number:x}" for number in digests],
            **entries,
        }

    def _require_size(self, name: str, tensor: Tensor, size: tuple[int, int], remedy: str) -> None:
        if tensor.ndim != 4 or tensor.shape[1:] != (1, *size):
            shape = f"[B, 1, {size[0]}, {size[1]}]"
            raise DataError(f"{self.name} gives {name} {[*tensor.shape]}, not {shape}: give it so, or {remedy}")

    def _share(self, loader: Any, method: str) -> Any:
        """A loader, for this process."""
        if isinstance(loader, Mapping | Sequence):
            raise DataError(f"{self.name}.{method} gives several loaders: give one, such as a DataLoader")
        share = getattr(self.trainer and self.trainer.strategy, "distributed_sampler_kwargs", None)
        sampler = getattr(loader, "sampler", None)
        if not share or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return loader
        if loader.batch_size is None or isinstance(sampler, DistributedSampler):
            return loader
        return DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=DistributedSampler(loader.dataset, shuffle=isinstance(sampler, RandomSampler), **share),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            worker_init_fn=loader.worker_init_fn,
            persistent_workers=loader.persistent_workers,
            prefetch_factor=loader.prefetch_factor,
        )


_SIZED = "image", "sinogram"


def n_batches(loader: Any) -> int:
    """The batches of an epoch of a loader; as many as a run can have if it does not know."""
    try:
        return len(loader)
    except TypeError:
        return 2**62


def samples_of(trainer: Trainer, loader: Any, step: int) -> int:
    """Slices that all devices together have had after this number of steps, if all batches of a loader are full."""
    return step * trainer.accumulate_grad_batches * trainer.world_size * (getattr(loader, "batch_size", None) or 1)
