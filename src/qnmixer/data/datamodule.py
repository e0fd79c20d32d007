"""The LightningDataModule: from a `data=…` config to three loaders."""

import errno
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from qnmixer.data.dataset import EpochSampler, Part, Sample, SliceDataset
from qnmixer.data.multiprocessing_private import call_if_unsent
from qnmixer.data.samplers import number_of
from qnmixer.data.sources import nothing_for, parts_of
from qnmixer.data.splits import Overlap, RunSplit, SplitRecord
from qnmixer.errors import DataError, first_line, say, visible
from qnmixer.physics import FanBeamGeometry
from qnmixer.runs.processes.process import SIGNALS, die_with_parent
from qnmixer.settings.data import DataConfig, MixedData


class SliceDataModule(LightningDataModule):
    """Slices of a source or a mix, split into train, val and test. `qnmixer.settings.data` has the settings.

    Batches are dicts: image [B, 1, S, S] float32, hu_offset [B], hu_scale [B], sample [B] int64, weight [B] and name
    (list of B), without image from a source of sinograms alone. With simulation_factor = f above 1 they also have fine
    [B, 1, f·S, f·S], or sinogram [B, 1, V, D] in its place. Training order and new phantoms depend on the epoch.
    Validation and test are always the same, and complete.

    Args:
        config: of the source.
        first: number of slices to use of each part; None: all.
        overfit: train on this number of slices again and again, and validate on the same slices.
        batches: of each process in an epoch of training, or the share of them; None: all.
        same_batches: each epoch has the same ones, in the order of the data.
        test: the number of test slices to use, or the share of them; None: all.
        split: the patients of each split; None: it is drawn.
        measure: simulates the sinogram of a sample in the loader's workers; None: only those with a measured one have
            a sinogram. It gets these too, to return as they are, or with the noise of a lower dose.
        geometry: the scan, which slices at their true size and measured sinograms need.
        dataset_class: of the slices.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        first: int | None = None,
        overfit: int | None = None,
        batches: int | float | None = None,
        same_batches: bool = False,
        test: int | float | None = None,
        split: RunSplit | None = None,
        measure: Callable[[str, Sample], Tensor] | None = None,
        geometry: FanBeamGeometry | None = None,
        dataset_class: Callable[..., SliceDataset] = SliceDataset,
    ) -> None:
        super().__init__()
        self.config, self.first, self.overfit, self.batches = config, first, overfit, batches
        self.same_batches, self.test = same_batches, test
        self.split = split or RunSplit()
        self.measure, self.geometry, self.dataset_class = measure, geometry, dataset_class
        self.parts: dict[str, Part] = {}
        self._start = (0, 0)

    def prepare_data(self) -> None:
        """Decode files into the cache; Lightning calls it on one process of a machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Find and split the slices, and print a description. A second call does nothing."""
        if self.parts:
            return
        self.parts = parts_of(self.config, self.split, self.geometry)
        if (limit := self.config.train_slices) is not None:
            length = len(self.parts["train"].source)
            n = min(limit, length)
            # Evenly spaced: the first n would come from a few patients.
            self.parts["train"] = self.parts["train"].only([k * length // n for k in range(n)])
        for name, part in self.parts.items():
            length = len(part.source)
            n = length if self.first is None else min(self.first, length)
            if name == "test" and self.test is not None:
                n = min(n, self.test) if isinstance(self.test, int) else max(1, int(n * self.test))
            if n < length:  # whole, a mix has new phantoms in every epoch
                self.parts[name] = part.only(range(n))

    @property
    def measured(self) -> bool:
        """Whether the sinograms were measured, also those of a class of the user's own."""
        self.setup()
        return any(part.measured for part in self.parts.values())

    @property
    def has_truth(self) -> bool:
        """Whether each slice has a true image."""
        return self.config.has_truth

    def trained(self, part: str, record: SplitRecord) -> Overlap:
        """How many slices of train, val or test a network was trained on, by the record of its split."""
        self.setup()
        section = None
        if part != "train" and isinstance(self.config, MixedData):
            section = f"data.sources.{self.config.evaluate_on}"
        return self.split.trained(part, record, section, len(self.parts[part].source))

    def dataset(self, part: str) -> SliceDataset:
        """Slices of train, val or test. Raises DataError if there are none."""
        self.setup()
        if not len(self.parts[part].source):
            raise DataError(nothing_for(part, self.config))
        measure = {} if self.measure is None else {"measure": partial(self.measure, part)}
        augment = self.config.augment and part == "train"
        return self.dataset_class(self.parts[part], self.config, part, augment=augment, **measure)

    def train_dataloader(self) -> DataLoader[Sample]:
        """Shuffled training batches."""
        return self.loader("train")

    def val_dataloader(self) -> DataLoader[Sample]:
        """Validation batches: the same slices in the same order every time."""
        return self.loader("val")

    def test_dataloader(self) -> DataLoader[Sample]:
        """Test batches: the same slices in the same order every time."""
        return self.loader("test")

    def loader(self, part: str) -> DataLoader[Sample]:
        """Batches of train, val or test. In a distributed run: the batches of this process.

        The strategy decides how processes share training batches. Validation and test are shared by all processes.
        """
        train, overfit = part == "train", self.overfit if part != "test" else None
        if train and self.same_batches:
            overfit = len(self.dataset("train"))
        dataset = self.dataset("train" if overfit else part)
        length = min(len(dataset), overfit) if overfit and not train else len(dataset)
        share: dict[str, Any] = {"batch_size": self.config.batch_size}
        if self.trainer and train:
            share |= getattr(self.trainer.strategy, "distributed_sampler_kwargs", {})
            share["accumulate"] = self.trainer.accumulate_grad_batches
            share["batches"] = self.batches
        elif self.trainer:
            share |= {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        sampler = EpochSampler(length, shuffle=train, seed=self.config.seed, fixed=not train, overfit=overfit, **share)
        if train:
            sampler.start_at(*self._start)
        workers = min(self.config.num_workers, -(-len(sampler) // sampler.batch_size))
        # For a dataset of the user's: what slices draw is seeded by their number. Without a generator of its own, each
        # new iterator would draw a number that dropout would get.
        place = [self.config.seed, zlib.crc32(part.encode()), sampler.rank, *(self._start if train else ())]
        generator = torch.Generator().manual_seed(number_of(place))
        pin = torch.cuda.is_available() if self.config.pin_memory is None else self.config.pin_memory
        return _Loader(
            dataset,
            batch_size=sampler.batch_size,
            sampler=sampler,
            num_workers=workers,
            worker_init_fn=partial(_end_with_parent_only, os.getpid()),
            generator=generator,
            pin_memory=pin,
            prefetch_factor=self.config.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device, except for numbers that the host reads: it would wait for the device."""
        on_host = {name: batch[name] for name in ("sample", "scan") if name in batch}
        entries = {name: value for name, value in batch.items() if name not in on_host}
        return super().transfer_batch_to_device(entries, device, dataloader_idx) | on_host

    def start_at(self, epoch: int, n_batches: int) -> None:
        """Start training in the middle of an epoch, after this number of batches of this process."""
        self._start = (epoch, n_batches)

    def describe(self) -> str:
        """One line: the number of slices and patients in each part."""
        self.setup()
        counts = [f"{name} {part}" for name, part in self.parts.items()]
        return f"data={self.config.name}, {self.config.image_size} × {self.config.image_size}: {', '.join(counts)}"


class _Loader(DataLoader[Any]):
    """A loader whose workers ignore stop signals. Ctrl-C and SLURM send these signals to all processes of a run.

    The run needs its workers to finish the current step. Its own process ends them with SIGTERM, which they obey.
    """

    def __iter__(self) -> Any:
        if not hasattr(signal, "sigwaitinfo"):
            return super().__iter__()
        # Blocked before a worker starts, so all threads of the worker inherit it, whichever library starts them.
        signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)


def _end_with_parent_only(parent: int, _: int) -> None:
    """Make a data worker end only when its parent ends it or dies, or when it cannot send a batch."""
    # torch's workers look every 5 s only, and never end if the parent has died before they began.
    die_with_parent(parent)
    call_if_unsent(_end_unsent)
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_end_when_parent_says, args=(parent,), daemon=True).start()


def _end_unsent(error: Exception, _: object) -> NoReturn:
    """End a data worker: Python would print the error and drop the batch, for which the run waits without end."""
    if "Too many open files" in str(error):
        os._exit(errno.EMFILE)  # `explain` knows it
    say(visible(f"a data worker cannot send its batch: {first_line(error)}"), sys.stderr)
    os._exit(1)


def _end_when_parent_says(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
