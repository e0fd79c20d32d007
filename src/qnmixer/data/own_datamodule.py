"""A LightningDataModule of the user's, as a run needs it: complete batches, shared by several devices."""

import inspect
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningDataModule, Trainer
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from qnmixer.data.batch import SHAPES
from qnmixer.data.own_batches import OwnBatches, content_of
from qnmixer.data.samplers import drawn_alike, drawn_by, has_distributed_sampler, share_of, shared, shares_itself
from qnmixer.data.splits import Overlap
from qnmixer.errors import DataError
from qnmixer.physics import FanBeamGeometry
from qnmixer.settings.data import DataConfig

NOT_PROMISED = (
    "not promised with it: that test slices are none of the training slices, which noise its images have, and that a "
    "resumed run goes on at the same slice (it does at the same step)"
)
_STAGES = {"train": "fit", "val": "fit", "test": "test", "predict": "predict"}
"""The stage that Lightning sets up before it asks for the loader of a part. That of fit has validation slices too."""


class OwnDataModule(LightningDataModule):
    """Wraps any LightningDataModule whose loaders yield batches as dicts, or pairs (image, sinogram).

    A dict has image [B, 1, S, S] or sinogram [B, 1, V, D], and may have the other keys of a `Batch`. What is missing is
    added, except an image. On several devices each gets its share of the batches that a DataLoader's own sampler draws.
    An IterableDataset shares itself.
    """

    def __init__(
        self,
        data_module: LightningDataModule,  # that of the user
        name: str,  # its target, for messages
        config: DataConfig,  # for size and scaling of the images
        geometry: FanBeamGeometry,  # for the size of sinograms
        part: str = "test",  # what is evaluated: train, val, test or predict
    ) -> None:
        super().__init__()
        self.data_module, self.name, self.geometry = data_module, name, geometry
        self.config = config.changed(simulation_factor=1, disc=False)  # of sources of `data` only
        self.split = SimpleNamespace(record=None)  # nobody knows which slices it has
        self.part = part
        self.first: int | None = None  # how many slices it looks at; None: all
        self.batch_size: int | None = None  # slices of the first training batch of this process; None before
        self._keys: frozenset[str] = frozenset()  # of a batch
        self._batches: dict[str, dict[int, OwnBatches]] = {}  # of the loaders of the parts of training
        self._ready: set[str | None] = set()
        self._to_compare = False

    # What Lightning calls

    def prepare_data(self) -> None:
        """Let the user's data module prepare its files. Lightning calls this on one process of a machine."""
        self.data_module.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up the user's data module, once for each stage."""
        if stage not in self._ready:
            self._ready.add(stage)
            self.data_module.trainer = self.trainer
            self.data_module.setup(stage or "fit")

    def teardown(self, stage: str) -> None:
        """Tear down the user's data module."""
        self._ready.discard(stage)
        self.data_module.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        """The state of the user's data module, for checkpoints."""
        return self.data_module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the user's data module, from a checkpoint."""
        self.data_module.load_state_dict(state_dict)

    def train_dataloader(self) -> Any:
        """The user's training batches; on several devices the share of this one."""
        share = getattr(self.trainer and self.trainer.strategy, "distributed_sampler_kwargs", {})
        return self._shared("train", self._user_loaders("train"), **share)

    def val_dataloader(self) -> Any:
        """The user's validation batches, of a list or dict of loaders too; on several devices the share of this one."""
        share = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank} if self.trainer else {}
        loaders = self._user_loaders("val")
        names, self._batches["val"] = loader_names(loaders), {}
        if not names:
            one = loaders_of(loaders)
            return self._shared("val", one[0] if len(one) == 1 else loaders, **share)
        module = getattr(self.trainer, "lightning_module", None)
        if module is not None and "dataloader_idx" not in inspect.signature(module.validation_step).parameters:
            raise DataError(
                f"{self.name}.val_dataloader gives several loaders: {type(module).__name__}.validation_step needs an "
                "argument dataloader_idx: int = 0, as Lightning has it"
            )
        several = enumerate(loaders_of(loaders))
        parts = [self._shared("val", loader, number=number, **share) for number, loader in several]
        return dict(zip(names, parts, strict=True)) if isinstance(loaders, Mapping) else parts

    def start_at(self, epoch: int, n_batches: int) -> None:
        """Do nothing: a loader of the user's starts where it starts."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, Any]:
        """Complete and check a batch of training or validation, on the host."""
        batch = self.data_module.on_before_batch_transfer(batch, dataloader_idx)
        trainer = self.trainer
        assert trainer is not None  # only Lightning calls this
        if trainer.training:
            completed = self._batches["train"][0].completed(batch, trainer.current_epoch, begun=trainer.current_epoch)
        else:
            completed = self._batches["val"][dataloader_idx].completed(batch, begun=trainer.global_step)
        self.note_keys(completed)
        loaders = loaders_of(trainer.train_dataloader if trainer.training else trainer.val_dataloaders)
        share = share_of(loaders[dataloader_idx])
        if share is not None:
            completed["weight"] = completed["weight"] * share.weights.popleft()
        if trainer.training:
            self.batch_size = self.batch_size or len(completed["weight"])
            self._require_other_batches(content_of(completed))
        return completed

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device, except its sample numbers, which the host reads."""
        entries = {name: value for name, value in batch.items() if name != "sample"}
        return self.data_module.transfer_batch_to_device(entries, device, dataloader_idx) | {"sample": batch["sample"]}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Let the user's data module change a batch on the device."""
        return self.data_module.on_after_batch_transfer(batch, dataloader_idx)

    def require_weight(self, part: str) -> None:
        """Raise DataError if no slice of train or val has had a weight. All processes call it together, after a pass.

        One of them alone may have no slice that counts.
        """
        assert self.trainer is not None
        weights = [batches.weight for batches in self._batches[part].values()]
        weight = torch.tensor(weights, device=self.trainer.strategy.root_device)
        if not self.trainer.strategy.reduce(weight, reduce_op="sum").all():
            raise DataError(f"{self.name}.{part}_dataloader has no slice with a weight above 0")

    # What an evaluation needs, as of a `SliceDataModule`

    @property
    def has_truth(self) -> bool:
        """Whether its batches have images."""
        return "image" in self._first_keys()

    @property
    def measured(self) -> bool:
        """Whether its batches have sinograms."""
        return "sinogram" in self._first_keys()

    def _first_keys(self) -> frozenset[str]:
        """What its batches have. If none is noted yet, it looks at the first one of the part."""
        if not self._keys:
            next(iter(self.loader(self.part)))
        return self._keys

    def note_keys(self, batch: Mapping[str, Any]) -> None:
        """Remember what its batches have."""
        self._keys = frozenset(batch)

    def describe(self) -> str:
        """Whose batches these are, and what is not promised with them."""
        size = self.config.image_size
        return f"datamodule={self.name}, {size} × {size}; {NOT_PROMISED}"

    def trained(self, *_: object) -> Overlap:
        """Nobody knows how many slices of a part a network was trained on."""
        return Overlap()

    def count(self, part: str) -> int | None:
        """The slices of a part, if a sampler knows them before they are loaded."""
        loader = self.loader(part).loader
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return None
        batches: Any = loader.batch_sampler
        n = None if batches is None else sum(map(len, batches))
        return n if self.first is None or n is None else min(n, self.first)

    def loader(self, part: str) -> "Numbered":
        """Complete batches of a part with the `number` of each slice; of several processes each gets its share.

        Raises DataError in several processes for a loader that shares its slices itself: nobody could number them.
        """
        loader = self._checked_loader(part, self._user_loaders(part))
        if self.trainer and self.trainer.world_size > 1 and shares_itself(loader):
            raise DataError(f"{self.name}.{part}_dataloader shares itself, so one process evaluates it: evaluate run=…")
        return Numbered(self, part, loader)

    # Loaders

    def batches_of(self, part: str, loader: Any, device: int | None = None) -> OwnBatches:
        """What completes and checks the batches of a loader; see `OwnBatches`."""
        return OwnBatches(str(self.name), part, self.config, self.geometry, loader, device)

    def _user_loaders(self, part: str) -> Any:
        """What the user's method gives for a part. Raises DataError without one."""
        if self.trainer is None:  # else Lightning has prepared its files
            self.prepare_data()
        self.setup(_STAGES[part])
        method = f"{part}_dataloader"
        try:
            return getattr(self.data_module, method)()
        except MisconfigurationException:  # of Lightning's own method
            raise DataError(f"{self.name} has no {method}") from None

    def _checked_loader(self, part: str, loader: Any) -> Any:
        """A loader of a part. Raises DataError for none, several or an empty one."""
        method = f"{part}_dataloader"
        if isinstance(loader, Mapping | Sequence | CombinedLoader):
            raise DataError(f"{self.name}.{method} gives several loaders: give one, such as a DataLoader")
        if not isinstance(loader, Iterable):
            raise DataError(f"{self.name}.{method} gives {loader}: give a DataLoader")
        if n_batches(loader) == 0:
            raise DataError(f"{self.name}.{method} has no batches")
        return loader

    def _shared(self, part: str, loader: Any, number: int = 0, num_replicas: int = 1, rank: int = 0) -> Any:
        """A loader, or the share of this process in its batches. Its datasets draw by `_seed` and the rank.

        `number`: its place among several.
        """
        own = self._checked_loader(part, loader)
        batches = self.batches_of(part, loader, rank if num_replicas > 1 else None)
        self._batches.setdefault(part, {})[number] = batches
        if num_replicas > 1:
            own = shared(loader, partial(self._seed, part), num_replicas, rank)
            is_alike = own is loader and not has_distributed_sampler(loader)
            self._to_compare = self._to_compare or (part == "train" and is_alike)
        # One that shares itself may need the same numbers in all processes.
        ranks = [] if own is loader else [rank]
        return drawn_by(own, lambda: [*self._seed(part), *ranks]) if isinstance(own, DataLoader) else own

    def _seed(self, part: str) -> list[int]:
        """The seed of the random numbers of a pass. Training has another one in each epoch, and after a resume."""
        place = [self.trainer.current_epoch, self.trainer.global_step] if self.trainer and part == "train" else []
        return [self.config.seed, zlib.crc32(part.encode()), *place]

    def _require_other_batches(self, content: Tensor) -> None:
        """Raise DataError if a loader that shares itself gives all devices the same first batch."""
        if not self._to_compare:
            return
        self._to_compare = False
        digests: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, zlib.crc32(content.numpy(force=True).tobytes()))
        if len({*digests}) == 1:
            raise DataError(
                f"{self.name}.train_dataloader gives all devices the same batch: an IterableDataset shares itself, by "
                "torch.distributed.get_rank()"
            )


class Numbered:
    """The batches of a part, complete, with the `number` of each slice. Of several processes each gets its share."""

    def __init__(self, data: OwnDataModule, part: str, loader: Any) -> None:
        self.data, self.part, self.loader = data, part, loader

    def __len__(self) -> int:
        return n_batches(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        data, trainer, start = self.data, self.data.trainer, 0
        n_processes, rank = (trainer.world_size, trainer.global_rank) if trainer else (1, 0)
        batches = data.batches_of(self.part, self.loader)
        for k, of_loader in enumerate(drawn_alike(self.loader, [data.config.seed])):
            batch = data.data_module.on_before_batch_transfer(of_loader, 0)
            is_named = isinstance(batch, Mapping) and "name" in batch
            batch = batches.completed(batch)
            data.note_keys(batch)
            n = len(batch["weight"])
            batch["number"] = torch.arange(start, start + n)
            if not is_named:
                batch["name"] = [f"{self.part}_{number}" for number in range(start, start + n)]
            if data.first is not None and start + n > data.first:
                n = data.first - start
                batch = {key: batch[key][:n] for key in (*SHAPES, "number") if key in batch}
            if n and k % n_processes == rank:
                yield batch
            start += n
            if start == data.first:
                return


def loaders_of(loaders: Any) -> list[Any]:
    """One loader, or several in a list or dict, as a list."""
    several = loaders.values() if isinstance(loaders, Mapping) else loaders
    return [*several] if isinstance(loaders, Mapping | list | tuple) else [loaders]


def loader_names(loaders: Any) -> list[str]:
    """The names of several loaders, in a dict its keys, in a list their numbers; empty for one."""
    n = len(loaders_of(loaders))
    return [] if n < 2 else [*map(str, loaders if isinstance(loaders, Mapping) else range(n))]


def n_batches(loader: Any) -> int:
    """The batches of an epoch of a loader; as many as a run can have if it does not know."""
    n = sized_len(loader)
    return 2**62 if n is None else n


def samples_of(trainer: Trainer, loader: Any, step: int) -> int:
    """Slices that all devices together have had after this number of steps, if all batches of a loader are full."""
    datamodule = getattr(trainer, "datamodule", None)
    batch_size = getattr(datamodule, "batch_size", None) or getattr(loader, "batch_size", None) or 1
    return step * trainer.accumulate_grad_batches * trainer.world_size * batch_size
