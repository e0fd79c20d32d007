"""Any LightningDataModule of a user: the example of docs/other_loops.md, and what of a batch is added."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning import LightningDataModule

from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import Config, parse
from qnmixer.engine.data.own import OwnDataModule
from qnmixer.engine.reconstructor import build_geometry
from qnmixer.engine.tracking.records import read_metrics
from qnmixer.engine.tracking.run import Run
from qnmixer.errors import DataError
from qnmixer.fit import fit

from ..conftest import TINY, environment
from ..warm import FORK_RANKS, Done, Warm

PAGE = Path(__file__).parents[2] / "docs" / "other_loops.md"
OWN = ["datamodule._target_=my_slices.MySlices", "+datamodule.folder=pairs"]
IMAGES_ONLY = """
from my_slices import MySlices

class Images(MySlices):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"image": batch[0]}
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
    for part, n in (("train", 8), ("val", 4)):
        pairs = torch.rand(n, 1, 16, 16, generator=generator), torch.rand(n, 1, 8, 24, generator=generator)
        torch.save(pairs, folder / "pairs" / f"{part}.pt")
    return folder


def train(warm: Warm, folder: Path, *words: str) -> Done:
    return warm.run("-m", "qnmixer.train", *words, cwd=folder, env=environment(**FORK_RANKS))


def steps_of(run: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(run / "metrics.csv") if row["train/loss"]]


@pytest.mark.slow
def test_it_trains_and_resumes_and_says_what_is_not_promised(here: Path, warm: Warm) -> None:
    words = [*TINY, *OWN, "test_after_training=true", "schedule=constant", "trainer.max_steps=3"]
    done = train(warm, here, *words, "hydra.run.dir=alone")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("not promised") == 1
    assert "-m qnmixer.evaluate run=" in done.stdout
    done = train(warm, here, "resume=alone", "trainer.max_steps=7")
    assert (done.returncode, done.stderr) == (0, "")
    assert "resumed at step 3 of 7" in done.stdout
    assert steps_of(here / "alone") == [1, 2, 3, 4, 5, 6, 7]
    refused = warm.run(
        "-m", "qnmixer.evaluate", "run=alone", "hydra.run.dir=table", cwd=here, env=environment()
    )  # fmt: skip
    (line,) = refused.stderr.splitlines()
    assert line.endswith("give others, as data=dicom data.root=FOLDER")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["my_slices.MySlices", pytest.param("my_images.Images", marks=pytest.mark.long)])
def test_two_processes_share_its_slices(here: Path, warm: Warm, target: str) -> None:
    two = ["strategy=ddp", "trainer.devices=2", "data.batch_size=1", "trainer.max_epochs=1", "trainer.max_steps=-1"]
    run = f"two_{target}"
    words = [*TINY, *OWN, *two, f"datamodule._target_={target}", "schedule=constant", f"hydra.run.dir={run}"]
    done = train(warm, here, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_of(here / run) == [1, 2, 3, 4]  # eight slices, one on each of two devices
    assert float(read_metrics(here / run / "metrics.csv")[-1]["samples"]) == 8


@pytest.fixture
def own() -> OwnDataModule:
    config = parse(compose("train", TINY))
    return OwnDataModule(LightningDataModule(), "my_file.Mine", config.data, build_geometry(config))


def test_limits_of_batches(
    here: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    """They were ignored: a run had all four batches of an epoch."""
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    words = [*OWN, "trainer.max_steps=-1", "trainer.max_epochs=2", "callbacks=none", "trainer.val_every_n_steps=null"]
    for limit in ("limit_train_batches", "overfit_batches"):
        fit(tiny_config(*words, f"trainer.{limit}=1"), Run(tmp_path / limit))
        assert steps_of(tmp_path / limit) == [1, 2]


def test_a_batch_is_completed(own: OwnDataModule) -> None:
    image = torch.rand(3, 1, 16, 16, dtype=torch.float64)
    batch, later = (own.completed({"image": image, "weight": torch.tensor([1, 1, 0])}, epoch) for epoch in (0, 1))
    assert batch["image"].dtype == torch.float32
    assert batch["weight"].tolist() == [1, 1, 0]
    assert batch["hu_offset"].tolist() == [-1000] * 3
    assert len({*batch["sample"].tolist(), *later["sample"].tolist()}) == 6
    assert len({*batch["name"]}) == 3
    assert torch.equal(own.completed({"image": image}, 0)["sample"], batch["sample"])


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ([torch.zeros(2, 1, 16, 16)] * 3, r"^my_file.Mine gives a list of 3: give a dict with image, or a pair "),
        ({"x": torch.zeros(1)}, r"^my_file.Mine gives a dict: give a dict with image"),
        ((torch.zeros(2, 1, 20, 20), torch.zeros(2, 1, 8, 24)), r"image \[2, 1, 20, 20\], not .*data.image_size=20$"),
        ((torch.zeros(2, 1, 16, 16), torch.zeros(2, 1, 9, 24)), r"sinogram \[2, 1, 9, 24\], not \[B, 1, 8, 24\]"),
    ],
)
def test_another_batch_is_refused_in_one_line(own: OwnDataModule, batch: object, line: str) -> None:
    with pytest.raises(DataError, match=line):
        own.completed(batch, 0)
