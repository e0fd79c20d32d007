"""Any LightningDataModule of a user: the example of docs/other_loops.md, and what of a batch is added."""

import random
import re
import warnings
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from lightning.fabric.utilities.data import _auto_add_worker_init_fn  # what a Trainer calls
from lightning.pytorch.utilities import CombinedLoader
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from qnmixer.data.batch import SHAPES
from qnmixer.data.own_datamodule import OwnDataModule
from qnmixer.errors import ConfigError, DataError
from qnmixer.fit import fit
from qnmixer.measurement.build import build_geometry, build_projector
from qnmixer.module import ReconstructionModule
from qnmixer.runs.records import read_metrics, read_results
from qnmixer.runs.run import Run

from ..conftest import TINY, config_of, environment, few_conditions, tiny_config
from ..warm import FORK_RANKS, Warm

PAGE = Path(__file__).parents[2] / "docs" / "other_loops.md"
OWN = ["datamodule._target_=my_slices.MySlices", "+datamodule.folder=pairs"]
IMAGES_ONLY = """
import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from my_slices import MySlices

class Images(MySlices):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch if isinstance(batch, dict) else {"image": batch[0]}

    def train_dataloader(self):
        return self.pairs("train")

    def predict_dataloader(self):
        return DataLoader([{"image": torch.rand(1, 16, 16), "name": "/a/../b"}])
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of the page, and the pairs that it reads."""
    folder = tmp_path_factory.mktemp("own_data")
    (_, code) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "my_slices.py").write_text(code)
    (folder / "my_images.py").write_text(IMAGES_ONLY)
    (folder / "pairs").mkdir()
    generator = torch.Generator().manual_seed(0)
    projector = build_projector(config_of(*TINY))
    for part, n in (("train", 7), ("val", 3), ("test", 3)):
        images = torch.rand(n, 1, 16, 16, generator=generator)
        torch.save((images, projector(images)), folder / "pairs" / f"{part}.pt")
    return folder


def run(warm: Warm, folder: Path, command: str, *words: str) -> str:
    """What a command says on standard output. It ends well, without a word on standard error."""
    done = warm.run("-m", f"qnmixer.{command}", *words, cwd=folder, env=environment(**FORK_RANKS))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def steps_of(run: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(run / "metrics.csv") if row["train/loss"]]


@pytest.mark.slow
def test_it_trains_and_resumes_and_comes_back(here: Path, warm: Warm) -> None:
    words = [*TINY, *OWN, "test_after_training=true", "schedule=constant", "trainer.max_steps=3"]
    said = run(warm, here, "train", *words, "hydra.run.dir=alone")
    assert said.count("not promised") == 1
    assert "datamodule=my_slices.MySlices (loading" in said
    assert "data=" not in said
    assert "resumed at step 3 of 7" in run(warm, here, "train", "resume=alone", "trainer.max_steps=7")
    assert steps_of(here / "alone") == [1, 2, 3, 4, 5, 6, 7]
    run(warm, here, "evaluate", "run=alone", "hydra.run.dir=table")
    after, again = (read_results(here / name) for name in ("alone", "table"))
    assert after["test"] == again["test"]
    assert after["evaluated"] == again["evaluated"]
    assert after["evaluated"]["data"] == "my_slices.MySlices"
    assert (here / "table" / "picture.png").is_file()
    assert images_of(here / "alone/evaluation") == ["test_0", "test_1", "test_2"]
    run(warm, here, "reconstruct", "run=alone", "input=predict_dataloader", "output=out", "formats=[npy]")
    names = [f"predict_{k}{end}.npy" for k in range(3) for end in ("", "_fbp")]
    assert sorted(path.name for path in (here / "out").iterdir()) == names


def images_of(folder: Path) -> list[str]:
    """The slices of a table, each by FBP and the network."""
    lines = (folder / "images.csv").read_text().splitlines()[1:]
    names = [line.split(",")[1] for line in lines]
    assert names[::2] == names[1::2]
    return names[::2]


@pytest.mark.slow
@pytest.mark.parametrize("target", [
    pytest.param("my_images.Images", marks=pytest.mark.extras),
    pytest.param("my_slices.MySlices", marks=pytest.mark.long),
])  # fmt: skip
def test_two_processes_share_its_slices(here: Path, warm: Warm, target: str) -> None:
    two = ["strategy=ddp", "trainer.devices=2", "data.batch_size=1", "trainer.max_epochs=1", "trainer.max_steps=-1"]
    folder = f"two_{target}"
    words = [*TINY, *OWN, *two, f"datamodule._target_={target}", "schedule=constant", f"hydra.run.dir={folder}"]
    run(warm, here, "train", *words, "test_after_training=true")
    assert steps_of(here / folder) == [1, 2, 3, 4]  # seven slices, one on each of two devices
    assert float(read_metrics(here / folder / "metrics.csv")[-1]["samples"]) == 8
    assert images_of(here / folder / "evaluation") == ["test_0", "test_1", "test_2"]
    if target == "my_images.Images":
        alone = ["strategy=single", "trainer.devices=null", "data.batch_size=2", "hydra.run.dir=one"]
        run(warm, here, "train", *words, *alone)
        of_one, of_two = (read_results(here / name)["best"]["val/psnr"] for name in ("one", folder))
        assert of_two == pytest.approx(of_one, rel=1e-5)  # also with a device that has no slice in the last step
        few = {"photons": "[1e5]", "views": "null", "crosstalk": "[0.02]", "truncation": "[1.5]"}
        words = ["hydra.run.dir=robust", "n_slices=2", *few_conditions(**few), "evaluation.tv_weight=null"]
        said = run(warm, here, "robustness", f"run={folder}", *words)
        assert "my_images.Images: 2 slices of its test_dataloader." in " ".join(said.split())
        run(warm, here, "reconstruct", f"run={folder}", "input=predict_dataloader", "output=inside", "formats=[npy]")
        assert (here / "inside/a/b.npy").is_file()


@pytest.fixture
def own() -> OwnDataModule:
    config = config_of(*TINY)
    return OwnDataModule(LightningDataModule(), "my_file.Mine", config.data, build_geometry(config))


def test_limits_of_batches(here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They were ignored: a run had all four batches of an epoch."""
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    words = [*OWN, "trainer.max_steps=-1", "trainer.max_epochs=2", "callbacks=none", "trainer.val_every_n_steps=null"]
    for limit in ("limit_train_batches", "overfit_batches"):
        fit(tiny_config(*words, f"trainer.{limit}=1"), Run(tmp_path / limit))
        assert steps_of(tmp_path / limit) == [1, 2]


def test_a_batch_is_completed(own: OwnDataModule) -> None:
    image = torch.rand(3, 1, 16, 16, dtype=torch.float64)
    batches = own.batches_of("train", None)
    batch, later = (batches.completed({"image": image, "weight": torch.tensor([1, 1, 0])}, epoch) for epoch in (0, 1))
    assert batch["image"].dtype == torch.float32
    assert batch["weight"].tolist() == [1, 1, 0]
    assert batch["hu_offset"].tolist() == [-1000] * 3
    assert len({*batch["sample"].tolist(), *later["sample"].tolist()}) == 6
    assert len({*batch["name"]}) == 3
    assert torch.equal(batches.completed({"image": image}, 0)["sample"], batch["sample"])


def of_pixel(value: float) -> torch.Tensor:
    """Two images of air, with this value in the second."""
    image = torch.zeros(2, 1, 16, 16)
    image[1, 0, 8, 8] = value
    return image


@pytest.mark.parametrize(("batch", "line"), [
    ([torch.zeros(2, 1, 16, 16)] * 3, r"^my_file.Mine gives a list of 3: give a dict with image or sinogram, or a "),
    ({"x": torch.zeros(1)}, r"^my_file.Mine gives a dict without image and sinogram: give"),
    ((torch.zeros(2, 1, 20, 20), torch.zeros(2, 1, 8, 24)), r"image \[2, 1, 20, 20\], not .*data.image_size=20$"),
    ((torch.zeros(2, 1, 16, 16), torch.zeros(2, 1, 9, 24)), r"sinogram \[2, 1, 9, 24\], not \[2, 1, 8, 24\]"),
    ((np.zeros((2, 1, 16, 16)), np.zeros((2, 1, 8, 24))), r"image as ndarray, not a tensor \[B, 1, 16, 16\]$"),
    ({"sinogram": torch.zeros(3, 1, 8, 24)}, r"sinogram \[3, 1, 8, 24\], not \[2, 1, 8, 24\]"),
    ({"fine": torch.zeros(2, 1, 32, 30)}, r"fine \[2, 1, 32, 30\], not \[2, 1, f·S, f·S\]$"),
    ({"hu_scale": torch.ones(2, 1)}, r"hu_scale \[2, 1\], not \[2\]$"),
    ({"hu_offset": torch.tensor(1.0)}, r"hu_offset \[\], not \[2\]$"),
    ({"weight": torch.ones(2, 1)}, r"weight \[2, 1\], not \[2\]$"),
    ({"weight": torch.ones(3)}, r"weight \[3\], not \[2\]$"),
    ({"weight": [1.0, 1.0]}, r"weight as list, not a tensor \[2\]$"),
    ({"sample": torch.tensor([-1, 0])}, r"sample \[-1, 0\], not integers from 0 on$"),
    ({"sample": torch.tensor([0.5, 1])}, r"sample \[0.5, 1.0\], not integers from 0 on$"),
    ({"name": ["a"]}, r"name \[1\], not \[2\]$"),
    ({"image": of_pixel(float("nan"))}, r"^my_file.Mine gives image with NaN or infinity \(val, slice 1\)$"),
    ({"sinogram": torch.full((2, 1, 8, 24), torch.inf)}, r"sinogram with NaN or infinity \(val, slice 0\)$"),
    ({"hu_scale": torch.tensor([1, 0])}, r"hu_scale that is not above 0 \(val, slice 1\)$"),
    ({"weight": torch.tensor([1, -1]), "name": ["a", "b"]}, r"weight below 0 \(val, slice 1, b\): give 0 for a"),
    (
        {"image": of_pixel(2000.0)},
        r"an image from 0 to 2000 \(val, slice 1\), which would be -1,000 to 5,999,000 HU: give "
        r"\(HU \+ 1000\) / 3000, or other hu_offset and hu_scale$",
    ),
    ({"image": of_pixel(-1.0)}, r"from -1 to 0 \(val, slice 1\), which would be -4,000 to -1,000 HU"),
])  # fmt: skip
def test_another_batch_is_refused_in_one_line(own: OwnDataModule, batch: object, line: str) -> None:
    if isinstance(batch, dict) and "x" not in batch:
        batch = {"image": torch.zeros(2, 1, 16, 16)} | batch
    with pytest.raises(DataError, match=line):
        own.batches_of("val", None).completed(batch)


def test_the_page_has_the_shapes_that_are_checked() -> None:
    rows = re.findall(r"^\| (`.+`) \| (\[.+?\])", PAGE.read_text(), re.MULTILINE)
    assert {key: shape for keys, shape in rows for key in re.findall(r"`(\w+)`", keys)} == SHAPES


class Drawing(Dataset[Any]):
    """Draws from every global generator, as augmentation does."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([np.random.rand(), random.random(), torch.rand(())])  # noqa: NPY002


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_dataset_draws_differs_by_seed_process_and_epoch_and_comes_again_after_a_resume(
    own: OwnDataModule, workers: int
) -> None:
    """With 0 workers, or after a resume, both processes, or all epochs, drew the same."""
    own.data_module.train_dataloader = own.data_module.val_dataloader = lambda: DataLoader(
        Drawing(), 2, num_workers=workers
    )
    trainer: Any = SimpleNamespace(world_size=2, global_rank=0, strategy=None, training=True)
    own.trainer, before = trainer, torch.get_rng_state()
    seen = []
    # The last is that of a resume at the end of the first epoch, in a process that has drawn something else.
    for seed, rank, epoch, step in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 2), (0, 0, 1, 2)):
        own.config = own.config.changed(seed=seed)
        trainer.current_epoch, trainer.global_step, trainer.global_rank = epoch, step, rank
        trainer.strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": rank})
        loader = own.train_dataloader()
        _auto_add_worker_init_fn(loader, rank)
        seen.append(torch.cat([*loader, *own.val_dataloader()])[:, :1].flatten().tolist())
        assert torch.equal(torch.get_rng_state(), before)
    assert seen[3] == seen[4]
    assert len({value for values in seen[:4] for value in values}) == 4 * 4 - 2  # validation is the same at each epoch


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([{"image": torch.full((1, 16, 16), 0.2 + k / 10)} for k in range(3)])


class Weighed(LightningDataModule):
    """Slices of a part with a weight of 0 each, of the others with none."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def loader(self, part: str) -> DataLoader[Any]:
        weight = {"weight": torch.tensor(0.0)} if part == self.part else {}
        return DataLoader([{"image": torch.rand(1, 16, 16)} | weight] * 2)

    train_dataloader = partialmethod(loader, "train")
    val_dataloader: Any = partialmethod(loader, "val")
    test_dataloader = partialmethod(loader, "test")


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_part_without_any_weight_ends_the_run(tmp_path: Path, part: str) -> None:
    """Validation gave NaN, for which the learning rate was blamed at the end of the run."""
    words = [f"datamodule._target_={__name__}.Weighed", f"+datamodule.part={part}", "trainer.max_steps=2"]
    line = (
        r"Weighed\.(train|val)_dataloader has no slice with a weight" if part != "test" else "has no slice of test with"
    )
    with pytest.raises(DataError, match=line):
        fit(tiny_config(*words, "callbacks=none", "test_after_training=true"), Run(tmp_path))


class TwoSites(Weighed):
    """Validation slices of two hospitals: one of the first, three of the second."""

    def val_dataloader(self) -> Any:
        sites = {site: DataLoader([{"image": torch.rand(1, 16, 16)}] * n) for site, n in (("A", 1), ("B.2", 3))}
        return sites if self.part == "dict" else [*sites.values()]


class OfOneLoader(ReconstructionModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize(("kind", "names"), [("dict", ("A", "B.2")), ("list", ("0", "1"))])
def test_validation_slices_of_two_sites(tmp_path: Path, kind: str, names: tuple[str, str]) -> None:
    words = [f"datamodule._target_={__name__}.TwoSites", f"+datamodule.part={kind}", "trainer.max_steps=2"]
    words += ["trainer.val_every_n_steps=1", f"monitor=val/psnr/{names[1]}"]
    best = fit(tiny_config(*words), Run(tmp_path))
    rows = read_metrics(tmp_path / "metrics.csv")
    first, second, both = ([float(row[name]) for row in rows if row.get(name)] for name in (
        *(f"val/psnr/{name}" for name in names), "val/psnr",
    ))  # fmt: skip
    assert len(both) == 2
    assert both == pytest.approx([(a + 3 * b) / 4 for a, b in zip(first, second, strict=True)], rel=1e-6)
    assert read_results(tmp_path)["best"] == {f"val/psnr/{names[1]}": pytest.approx(max(second))}
    assert best == pytest.approx(max(second))


@pytest.mark.parametrize(("word", "error", "line"), [
    ("monitor=val/psnr/C", ConfigError, "monitor=val/psnr/C is not known: validation logs .*val/psnr/A"),
    (f"module._target_={__name__}.OfOneLoader", DataError, "OfOneLoader.validation_step needs an argument data"),
])  # fmt: skip
def test_what_two_sites_need(tmp_path: Path, word: str, error: type[Exception], line: str) -> None:
    words = [f"datamodule._target_={__name__}.TwoSites", "+datamodule.part=dict", "trainer.max_steps=2", word]
    with pytest.raises(error, match=line):
        fit(tiny_config(*words), Run(tmp_path))


def test_a_stream_that_its_workers_do_not_divide_is_named(own: OwnDataModule) -> None:
    """Each slice counted twice, in training and in tables, without a word."""
    loader = DataLoader(Stream(), 2, num_workers=2)
    own.data_module.test_dataloader = lambda: loader
    with pytest.warns(
        UserWarning, match=r"test_dataloader gives the same slices from each of its 2 workers.*_worker_info"
    ):
        numbers = [batch["number"].tolist() for batch in own.loader("test")]
    assert numbers == [[0, 1], [2, 3], [4], [5]]


def test_images_of_air_only_are_doubted_once(own: OwnDataModule) -> None:
    """As those in attenuation are: 0.02 a millimetre is water."""
    batches = own.batches_of("train", None)
    air = {"image": torch.full((2, 1, 16, 16), 0.02)}
    with pytest.warns(UserWarning, match=r"first images of train are nothing but air \(up to -940 HU\)"):
        batches.completed(air)
    with warnings.catch_warnings(action="error"):
        batches.completed(air)


def test_a_stream_is_refused_if_all_devices_get_the_same_and_is_evaluated_by_one_process(own: OwnDataModule) -> None:
    own.data_module.train_dataloader = own.data_module.test_dataloader = lambda: DataLoader(Stream(), 2)
    numbers = [batch["number"].tolist() for batch in own.loader("test")]
    assert (numbers, own.count("test")) == ([[0, 1], [2]], None)
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0})
    trainer: Any = SimpleNamespace(world_size=2, global_rank=0, strategy=strategy, training=True, current_epoch=0)
    trainer.global_step = 0
    own.trainer, trainer.train_dataloader = trainer, None
    with pytest.raises(DataError, match="test_dataloader shares itself, so one process evaluates it"):
        own.loader("test")
    (batch, *_) = own.train_dataloader()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(DataError, match="train_dataloader gives all devices the same batch"):
            own.on_before_batch_transfer(batch, 0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("method", ["train_dataloader", "val_dataloader", "test_dataloader"])
@pytest.mark.parametrize(("loader", "line"), [
    (None, "gives None: give a DataLoader$"),
    ([], "gives several loaders"),
    (CombinedLoader([DataLoader([1])]), "gives several loaders"),
    (DataLoader([]), "has no batches$"),
])  # fmt: skip
def test_what_is_no_loader_is_refused(own: OwnDataModule, method: str, loader: Any, line: str) -> None:
    with pytest.raises(DataError, match=f"my_file.Mine has no {method}"):
        own.loader(method.removesuffix("_dataloader"))
    setattr(own.data_module, method, lambda: loader)
    with pytest.raises(DataError, match=rf"my_file.Mine.{method} {line}"):
        own.loader(method.removesuffix("_dataloader"))
