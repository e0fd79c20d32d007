"""The LightningDataModule: from a `data=…` configuration to three loaders."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from qnmixer.config import sources_of
from qnmixer.config.data import (
    CustomData,
    DataConfig,
    DeepLesionData,
    DicomData,
    FolderData,
    MixedData,
    NumpyData,
    PhantomData,
)
from qnmixer.config.option import check_bounds
from qnmixer.data.cache import Reader, SliceCache, open_cache
from qnmixer.data.custom import CustomSource
from qnmixer.data.dataset import Sample, SliceDataset, SliceView
from qnmixer.data.deeplesion import DeepLesionReader
from qnmixer.data.dicom import DicomReader
from qnmixer.data.mixed import MixedSource, counts_of
from qnmixer.data.numpy_files import NumpyReader
from qnmixer.data.phantoms import PhantomSource
from qnmixer.data.sampler import EpochSampler
from qnmixer.data.scaling import build_scaling
from qnmixer.data.slices import SliceSource, summarise_skipped
from qnmixer.data.splits import PARTS, patients_of, split_slices
from qnmixer.errors import ConfigError, DataError, UserError
from qnmixer.processes.signals import SIGNALS


@dataclass(frozen=True)
class Part:
    """Slices of train, val or test, how many patients they show (0: not told), and the slices on a finer grid.

    `told`: how many of them each source of a mix has in an epoch.
    """

    source: SliceSource
    n_patients: int
    fine: SliceSource | None = None
    told: str = ""

    def __str__(self) -> str:
        if self.told:
            return f"{len(self.source)} slices an epoch ({self.told})"
        people = f" of {self.n_patients} patient{'s' * (self.n_patients > 1)}" if self.n_patients else ""
        return f"{len(self.source)} slices{people}"

    def first(self, n: int) -> "Part":
        """Its first slices only; whose they are is not counted."""
        return self._some(list(range(min(n, len(self.source)))))

    def spread(self, n: int) -> "Part":
        """So many of its slices, evenly spread; whose they are is not counted."""
        length = len(self.source)
        n = min(n, length)
        return self._some([k * length // n for k in range(n)])

    def _some(self, indices: list[int]) -> "Part":
        return Part(SliceView(self.source, indices), 0, self.fine and SliceView(self.fine, indices))


class SliceDataModule(LightningDataModule):
    """Slices of a source or a mix, split into train, val and test; see `qnmixer.config.data` for what can be set.

    Batches are dicts: image [B, 1, S, S] float32, hu_offset [B], hu_scale [B], sample [B] int64, weight [B], name
    (list of B), and fine [B, 1, f·S, f·S] with simulation_factor = f above 1.
    Training order and new phantoms follow the epoch; validation and test are the same every time and leave nothing out.

    Args:
        config: of the source.
        first: only so many slices of each part.
        overfit: train on so many slices over and over, and validate on the same.
        batches: of each process in an epoch of training, or the share of them; None: all.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        first: int | None = None,
        overfit: int | None = None,
        batches: int | float | None = None,
    ) -> None:
        super().__init__()
        check_bounds("data.", config)
        self.config, self.first, self.overfit, self.batches = config, first, overfit, batches
        self.scaling = build_scaling(config.scaling, config.hu_max)
        self.parts: dict[str, Part] = {}
        self._start = (0, 0)

    def prepare_data(self) -> None:
        """Decode files into the cache; Lightning calls it on one process of a machine."""
        for key, source in sources_of(self.config).items():
            if isinstance(source, FolderData) and not self.parts:
                with _of_section(key):
                    for size in {source.image_size, _fine_size(source)}:
                        _open_folder(source, size)

    def setup(self, stage: str | None = None) -> None:
        """Find, split and describe the slices; does nothing the second time."""
        if not self.parts:
            self.parts = _parts(self.config)
            if self.config.train_slices is not None:
                self.parts["train"] = self.parts["train"].spread(self.config.train_slices)
            if self.first is not None:
                self.parts = {name: part.first(self.first) for name, part in self.parts.items()}

    def dataset(self, part: str) -> SliceDataset:
        """Slices of train, val or test; DataError when there are none."""
        self.setup()
        source, fine = self.parts[part].source, self.parts[part].fine
        if not len(source):
            raise DataError(_nothing_for(part, self.config))
        augment = self.config.augment and part == "train"
        return SliceDataset(
            source, self.scaling, augment=augment, seed=self.config.seed, fine=fine, disc=self.config.disc
        )

    def train_dataloader(self) -> DataLoader[Sample]:
        """Shuffled batches."""
        return self.loader("train")

    def val_dataloader(self) -> DataLoader[Sample]:
        """The same slices in the same order every time."""
        return self.loader("val")

    def test_dataloader(self) -> DataLoader[Sample]:
        """The same slices in the same order every time."""
        return self.loader("test")

    def loader(self, part: str) -> DataLoader[Sample]:
        """Batches of train, val or test; of a distributed run, those of this process.

        Training shares them out as the strategy says, validation and test over all processes.
        """
        train, overfit = part == "train", self.overfit if part != "test" else None
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
        only_with_workers: dict[str, Any] = {}
        if workers:
            only_with_workers = {"prefetch_factor": self.config.prefetch_factor, "persistent_workers": True}
        pin = torch.cuda.is_available() if self.config.pin_memory is None else self.config.pin_memory
        return _Loader(
            dataset,
            batch_size=sampler.batch_size,
            sampler=sampler,
            num_workers=workers,
            worker_init_fn=_end_with_parent_only,
            generator=torch.Generator(),  # else each iterator would draw from the one that dropout goes on with
            pin_memory=pin,
            **only_with_workers,
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move all of a batch but its sample numbers, which are read on the host: a device would be waited for."""
        rest = {name: value for name, value in batch.items() if name != "sample"}
        return super().transfer_batch_to_device(rest, device, dataloader_idx) | {"sample": batch["sample"]}

    def start_at(self, epoch: int, n_batches: int) -> None:
        """Have training begin in the middle of an epoch, after so many batches of this process."""
        self._start = (epoch, n_batches)

    def describe(self) -> str:
        """One line: slices and patients of each part."""
        self.setup()
        counts = [f"{name} {part}" for name, part in self.parts.items()]
        return f"data={self.config.name}, {self.config.image_size} × {self.config.image_size}: {', '.join(counts)}"


class _Loader(DataLoader[Any]):
    """A loader whose workers live through the signals that stop a run: Ctrl-C and SLURM send them to all processes.

    The run needs its workers for the step at hand. Its own process ends them by SIGTERM too, and may.
    """

    def __iter__(self) -> Any:
        if not hasattr(signal, "sigwaitinfo"):
            return super().__iter__()
        # Blocked before a worker begins, so that each of its threads is born so, whichever library starts it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent_only(_: int) -> None:
    """Have a data worker end when its parent says so."""
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_end_when_parent_says, args=(os.getppid(),), daemon=True).start()


def _end_when_parent_says(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _parts(config: DataConfig) -> dict[str, Part]:
    if isinstance(config, MixedData):
        return _mixed_parts(config)
    if isinstance(config, PhantomData):
        return _phantom_parts(config)
    if isinstance(config, CustomData):
        return _custom_parts(config)
    assert isinstance(config, FolderData)
    return _folder_parts(config)


def _mixed_parts(config: MixedData) -> dict[str, Part]:
    """Training slices by their shares; those of one source to validate and test, or of all."""
    sources: dict[str, dict[str, Part]] = {}
    for key, source in sources_of(config).items():
        with _of_section(key):
            sources[key] = parts = _parts(source)
            if not len(parts["train"].source) and config.shares[key.rpartition(".")[2]]:
                raise DataError(f"{_nothing_for('train', source)}, or share=0")
    train = [parts["train"] for parts in sources.values()]
    counts = counts_of(list(config.shares.values()), [len(part.source) for part in train])
    for (name, share), count in zip(config.shares.items(), counts, strict=True):
        if share and not count:
            raise DataError(f"data.sources.{name}.share={share} of an epoch of {sum(counts)} slices is none: raise it")
    told = "; ".join(
        f"{share:.4g} {name}: {count} {'new ones' if part.source.endless else f'of {part}'}"
        for (name, share), count, part in zip(config.shares.items(), counts, train, strict=True)
        if share
    )

    def measured(name: str) -> Part:
        if config.evaluate_on is not None:
            return sources[f"data.sources.{config.evaluate_on}"][name]
        of_all = [parts[name] for parts in sources.values()]
        return _mix(of_all, [len(part.source) for part in of_all], config.seed)

    return {"train": replace(_mix(train, counts, config.seed), told=told)} | {n: measured(n) for n in PARTS[1:]}


def _mix(parts: Sequence[Part], counts: Sequence[int], seed: int) -> Part:
    fine = [part.fine for part in parts if part.fine is not None]
    return Part(
        MixedSource([part.source for part in parts], counts, seed=seed),
        sum(part.n_patients for part in parts),
        MixedSource(fine, counts, seed=seed) if fine else None,
    )


@contextmanager
def _of_section(key: str) -> Iterator[None]:
    """Say of an error which source of a mix it is about."""
    try:
        yield
    except UserError as error:
        raise (type(error)(f"{error} ({key})") if key != "data" else error) from error


def _nothing_for(part: str, config: DataConfig) -> str:
    hint = ""
    if isinstance(config, FolderData):
        hint = f" with data.split={config.split}; choose another split"
    elif isinstance(config, MixedData):
        hint = f" with data.evaluate_on={config.evaluate_on}; choose a source that has some"
    return f"data={config.name} has no slices for {part}{hint}"


def _phantom_parts(config: PhantomData) -> dict[str, Part]:
    """Endless phantoms to train on, fixed ones to validate and test."""
    lengths = {"train": config.n_train, "val": config.n_val, "test": config.n_test}

    def source(part: str, fine: bool) -> PhantomSource:
        return PhantomSource(
            part,
            lengths[part],
            config.image_size,
            seed=config.seed,
            anatomy_share=config.anatomy_share,
            fine=fine,
        )

    finer = config.simulation_factor > 1
    return {part: Part(source(part, fine=False), 0, source(part, fine=True) if finer else None) for part in lengths}


def _custom_parts(config: CustomData) -> dict[str, Part]:
    size, factor = config.image_size, config.simulation_factor

    def fine(part: str) -> CustomSource | None:
        return CustomSource(config, part, factor * size) if factor > 1 else None

    return {part: Part(CustomSource(config, part, size), 0, fine(part)) for part in PARTS}


def _folder_parts(config: FolderData) -> dict[str, Part]:
    cache = _open_folder(config, config.image_size)
    if cache.skipped:
        rank_zero_warn(summarise_skipped(str(config.root), cache.skipped))
    if cache.hu_range[0] > -500:
        rank_zero_warn(f"{config.root}: no pixel is below −500 HU; is this really in HU (air −1000, water 0)?")
    if config.split == "slices":
        rank_zero_warn("data.split=slices puts neighbouring slices into train and test: scores will be too good")
    patients = patients_of(
        cache.infos,
        patient_from=config.patient_from,
        root_name=Path(str(config.root)).resolve().name,
    )
    split = split_slices(cache.infos, patients, config)
    fine = None if config.simulation_factor == 1 else _open_folder(config, _fine_size(config))
    return {
        part: Part(
            SliceView(cache, split[part]),
            len({patients[i] for i in split[part]}),
            fine and SliceView(fine, split[part]),
        )
        for part in PARTS
    }


def _fine_size(config: DataConfig) -> int:
    return config.image_size * config.simulation_factor


def _open_folder(config: FolderData, image_size: int) -> SliceCache:
    """The decoded slices of a folder source, [image_size, image_size]."""
    if not config.root:
        raise ConfigError(f"data={config.name} needs data.root=FOLDER, the folder that holds the slices")
    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else None
    return open_cache(
        _reader(config),
        Path(config.root).expanduser(),
        image_size,
        include=config.include,
        cache_dir=cache_dir,
    )


def _reader(config: FolderData) -> Reader:
    """What decodes the files of a folder source."""
    if isinstance(config, DicomData):
        return DicomReader()
    if isinstance(config, DeepLesionData):
        return DeepLesionReader()
    if isinstance(config, NumpyData):
        return NumpyReader()
    raise ConfigError(f"data={config.name} is unknown; choose phantoms, dicom, deeplesion or numpy")
