"""Training on measured pairs from end to end: both public sets, in small."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError, DataError
from qnmixer.evaluation.evaluate import title_of
from qnmixer.evaluation.evaluate_config import EvaluateConfig
from qnmixer.evaluation.evaluate_run import evaluate_run
from qnmixer.measurement.build import build_geometry, build_noise
from qnmixer.measurement.measurement import STREAMS
from qnmixer.module.build import build_data_module, build_module
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.runs.terminal import Console
from qnmixer.settings.compose import compose
from qnmixer.settings.run import section
from qnmixer.train import train
from qnmixer.training.steps import build_trainer
from qnmixer.training.terminal import print_start

from ..conftest import TINY, config_of, csv_rows
from ..saved import save
from ..sets import write_lodopab, write_two_detect
from ..warm import Warm

VIEWS = 8
WORDS = [
    *(word for word in TINY if not word.startswith(("geometry.", "data.image_size"))), f"geometry.n_views={VIEWS}",
    "data.image_size=48", "data.batch_size=1", "trainer.max_steps=2", "model.n_iterations=1", "callbacks=none",
]  # fmt: skip


def lodopab(root: Path) -> list[str]:
    words = ["data=lodopab", "geometry=lodopab", f"data.root={root}"]
    geometry = build_geometry(config_of(*WORDS, *words))
    write_lodopab(root, geometry, {"train": 3, "validation": 1, "test": 3})
    return words


def two_detect(root: Path) -> list[str]:
    words = ["data=two_detect", "geometry=two_detect", f"data.root={root}", "data.mode=1"]
    geometry = build_geometry(config_of(*WORDS, *words))
    write_two_detect(root, root, geometry, [1, 2831, 3931, 4531, 4532, 5000], modes=[1])
    return words


def scores(folder: Path) -> dict[tuple[str, str], tuple[float, float]]:
    rows = csv_rows(folder / "images.csv")
    return {(row["slice"], row["method"]): (float(row["psnr"]), float(row["ssim"])) for row in rows}


@pytest.mark.long
@pytest.mark.parametrize(("files", "reader"), [(lodopab, "h5py"), (two_detect, "tifffile")])
def test_a_run_trains_resumes_and_is_scored_as_the_set_is(
    files: Callable[[Path], list[str]], reader: str, tmp_path: Path, warm: Warm
) -> None:
    """Two steps alone, two more on two processes, which measure as one process does, and as skimage does."""
    pytest.importorskip(reader)
    metrics = pytest.importorskip("skimage.metrics")
    overrides = [*WORDS, *files(tmp_path / "set"), f"hydra.run.dir={tmp_path / 'run'}"]
    train(*overrides, "trainer.accumulate_grad_batches=2")
    more = [
        "trainer.accumulate_grad_batches=1", "strategy=ddp", "trainer.devices=2", "trainer.max_steps=4",
        "data.num_workers=1", "test_after_training=true",
    ]  # fmt: skip
    with warm.forking_ranks():
        train(*overrides, f"resume={tmp_path / 'run'}", *more)
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (record["status"], record["steps"]) == ("done", 4)
    assert "measured" in (tmp_path / "run" / "evaluation" / "table.md").read_text()

    module = load_run(tmp_path / "run").eval()
    data = SliceDataModule(module.config.data, geometry=module.projector.geometry)
    noisy = EvaluateConfig.parse(compose("evaluate", [f"run={tmp_path / 'run'}", "noise=field", "accelerator=cpu"]))
    with pytest.raises(ConfigError, match=r"noise=field has no effect on measured sinograms of data=.*: leave it out"):
        evaluate_run(noisy, tmp_path / "noisy", [])
    found = scores(tmp_path / "run" / "evaluation")
    assert len(found) == 2 * 3
    for batch in data.test_dataloader():
        truth = batch["image"][0, 0].numpy()
        with torch.no_grad():
            images = {"FBP": module.projector.fbp(batch["sinogram"]), "QN-Mixer": module(batch["sinogram"])}
        for method, image in images.items():
            x, spread = image[0, 0].numpy(), float(truth.max() - truth.min())
            expected = (
                metrics.peak_signal_noise_ratio(truth, x, data_range=spread),
                100 * metrics.structural_similarity(truth, x, data_range=spread),
            )
            assert found[batch["name"][0], method] == pytest.approx(expected, abs=1e-4)


class Pairs:
    """A user's own: slices in HU, with what was measured of them."""

    def __init__(self, part: str, bins: int = 24, value=1.0) -> None:
        self.bins, self.value = bins, value

    def __len__(self) -> int:
        return 3

    def load(self, index: int) -> Any:
        return np.full((20, 20), 100.0 * index, np.float32)

    def sinogram(self, index: int) -> Any:
        return np.full((8, self.bins), self.value * index)


def custom(**keys: Any) -> SliceDataModule:
    config = section(
        "data", "custom", image_size=16, num_workers=0, batch_size=3, **{"_target_": f"{__name__}.Pairs"} | keys
    )
    return SliceDataModule(config, geometry=build_geometry(config_of(*TINY)))


def test_a_class_of_ones_own_brings_sinograms(tmp_path: Path) -> None:
    data = custom()
    (batch,) = data.test_dataloader()
    config = config_of(*TINY, "trainer.accelerator=cpu", "logger=csv")
    assert title_of(config, config.geometry.n_views, data, "test").endswith("8 views, measured")
    trainer, text = build_trainer(config, tmp_path, [], []), io.StringIO()
    print_start(config, build_module(config), data, trainer, Console(file=text))
    assert "8 views × 24 detector bins, measured\n" in text.getvalue()
    assert batch["sinogram"].shape == (3, 1, 8, 24)
    assert batch["sinogram"][:, 0, 0, 0].tolist() == [0, 1, 2]
    module = custom(train_slices=2)
    assert sorted(int(it["sinogram"][0, 0, 0]) for it in map(module.dataset("train").__getitem__, range(2))) == [0, 1]


INSERT = ["noise=insert", "noise.dose=0.25", "noise.photons=1e4"]


def test_a_lower_dose_is_inserted_into_what_was_measured(tmp_path: Path) -> None:
    """In training and in evaluation. New in each epoch, and for validation and test always the same."""
    own = ["data=custom", f"data._target_={__name__}.Pairs", "data.num_workers=0"]
    config = config_of(*TINY, *own, "trainer.accelerator=cpu", "logger=csv", *INSERT)
    data = build_data_module(config)
    twice = [torch.cat([batch["sinogram"] for batch in data.test_dataloader()]) for _ in range(2)]
    assert torch.equal(*twice)
    keys = [(config.seed, STREAMS["test"], k) for k in range(3)]
    y = torch.stack([torch.full((1, 8, 24), float(k)) for k in range(3)])
    assert torch.equal(twice[0], build_noise(config)(y, keys))
    train = data.dataset("train")
    assert not torch.equal(train[0]["sinogram"], train[3]["sinogram"])
    assert title_of(config, config.geometry.n_views, data, "test").endswith("8 views, measured, noise insert")
    run = save(tmp_path / "run", *TINY, *own)
    words = [f"run={run}", "accelerator=cpu", f"trust={__name__}", "evaluation.n_pictures=1"]
    folders = [tmp_path / name for name in ("full", "quarter")]
    for folder, noise in zip(folders, ([], INSERT), strict=True):
        evaluate_run(EvaluateConfig.parse(compose("evaluate", [*words, *noise])), folder, [])
    full, quarter = (scores(folder)["test 2", "FBP"][0] for folder in folders)
    assert full > quarter


def test_sinograms_of_another_scan_and_images_that_change_are_refused() -> None:
    with pytest.raises(DataError, match=r"test 0 cannot be used \(a sinogram of shape \[8, 23\], not \[8, 24\]"):
        custom(bins=23).dataset("test")[0]
    with pytest.raises(DataError, match=r"test 0 cannot be used \(NaN or infinite values in its sinogram"):
        custom(value=np.nan).dataset("test")[0]
    for key, value in {"augment": True, "scaling": "minmax"}.items():
        with pytest.raises(ConfigError, match=rf"data\.{key}={value} changes images"):
            custom(**{key: value}).setup()


def test_public_sets_stand_alone() -> None:
    words = ["data=mixed", "data.sources.slices.root=x", "+data.sources.more={share: 0.0, name: lodopab, root: y}"]
    with pytest.raises(ConfigError, match="more has images and sinograms of its own: take it alone"):
        config_of(*words)
