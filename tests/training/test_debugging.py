import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qnmixer.engine.batch import Batch
from qnmixer.engine.checkpoints.reading import load_run
from qnmixer.engine.config import Config
from qnmixer.engine.config.run import section
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.sampler import EpochSampler
from qnmixer.engine.parallel.devices import resolve_devices
from qnmixer.engine.tracking.run import Run
from qnmixer.fit import fit
from qnmixer.module import ReconstructionModule

TinyConfig = Callable[..., Config]
Build = Callable[..., ReconstructionModule]


@pytest.mark.parametrize(("replicas", "batch"), [(1, 4), (2, 2), (4, 1)])
def test_every_step_of_overfitting_has_the_same_slices(replicas: int, batch: int) -> None:
    samplers = [
        EpochSampler(8, shuffle=True, batch_size=batch, num_replicas=replicas, rank=rank, overfit=4)
        for rank in range(replicas)
    ]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in samplers]
        for step in range(2):
            picks = [pick for share in shares for pick in share[step * batch : (step + 1) * batch]]
            assert sorted(pick.n for pick in picks) == [0, 1, 2, 3]
            assert {pick.weight for pick in picks} == {1.0}


def test_overfitting_validates_on_what_it_trains_on(tiny_module: Build) -> None:
    module = tiny_module("debug=overfit", "noise=field", "data.augment=true")
    data = SliceDataModule(module.config.data, overfit=2)
    train: list[Batch] = list(data.train_dataloader())  # type: ignore[arg-type]  # samples, collated
    (val,) = data.val_dataloader()
    for batch in train:
        assert torch.equal(batch["image"], val["image"])
        assert torch.equal(module.measure(batch, "train"), module.measure(val, "val"))  # type: ignore[arg-type]  # collated
    test = next(iter(data.test_dataloader()))
    assert not torch.equal(test["image"], val["image"])


def test_the_first_slices_are_those_of_the_whole_parts() -> None:
    config = section("data", "phantoms", image_size=16, num_workers=0, n_train=6, n_val=3, n_test=5)
    whole, few = SliceDataModule(config), SliceDataModule(config, first=4)
    assert "train 4 slices, val 3 slices, test 4 slices" in few.describe()
    for part in ("train", "val", "test"):
        for n, sample in enumerate(few.dataset(part)[n] for n in range(len(few.dataset(part)))):
            assert torch.equal(sample["image"], whole.dataset(part)[n]["image"])


def trained(config: Config, folder: Path) -> dict[str, Any]:
    fit(resolve_devices(config), Run(folder))
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_overfitting_drives_the_loss_down(tiny_config: TinyConfig, tmp_path: Path) -> None:
    options = ["model.n_iterations=3", "model.channels=16", "optimizer.lr=3e-3", "trainer.val_every_n_steps=40"]
    results = trained(tiny_config("debug=overfit", *options, "trainer.max_steps=40"), tmp_path)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train/loss")
    losses = [float(value) for line in lines[1:] if (value := line.split(",")[column])]
    assert losses[-1] < losses[0] / 3
    assert results["status"] == "done"
    assert "test" not in results


@pytest.mark.slow
def test_few_batches_are_a_whole_run(tiny_config: TinyConfig, tmp_path: Path) -> None:
    results = trained(tiny_config("debug=few_batches", "data.n_train=1000", "data.n_test=1000"), tmp_path)
    assert results["status"] == "done"
    assert len((tmp_path / "evaluation" / "images.csv").read_text().splitlines()) == 1 + 2 * 4
    assert load_run(tmp_path).config.data == tiny_config("data.n_train=1000", "data.n_test=1000").data


@pytest.mark.slow
def test_a_profile_is_a_trace_that_viewers_open(
    tiny_config: TinyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["debug.warm_up=1", "debug.steps=1", "trainer.max_steps=2", "trainer.accumulate_grad_batches=2"]
    trained(tiny_config("debug=profile", *options), tmp_path)
    with gzip.open(tmp_path / "profile" / "rank_0.json.gz", "rt") as stream:
        events = json.load(stream)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in spans)
    assert sum(event["name"].startswith("ProfilerStep#") for event in spans) == 1
    assert sum(event["name"] == "Optimizer.step#AdamW.step" for event in spans) == 1
    assert any(event["name"] == "qnmixer::csr_product" for event in spans)
    assert "https://ui.perfetto.dev" in capsys.readouterr().out
    assert "Optimizer.step#AdamW.step" in (tmp_path / "profile" / "rank_0.txt").read_text()


@pytest.mark.slow
def test_a_profile_of_too_few_steps_is_none(
    tiny_config: TinyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table would divide by steps that were not there, and count the validation after training."""
    options = ["debug.warm_up=3", "debug.steps=2", "trainer.max_steps=-1", "trainer.max_epochs=1"]
    trained(tiny_config("debug=profile", *options), tmp_path)
    assert not (tmp_path / "profile").exists()
    assert "profile: none, as training ended after 4 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_anomaly_detection_names_the_operator_and_the_line(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ReconstructionModule.training_step

    def bad_loss(self: ReconstructionModule, batch: Batch, batch_idx: int) -> Tensor:
        image = self.network(self.measure(batch, "train"))
        return whole(self, batch, batch_idx) + (0 * image).sum().sqrt()

    monkeypatch.setattr(ReconstructionModule, "training_step", bad_loss)
    with pytest.raises(
        FloatingPointError, match=r"NaN in MulBackward0 of `.*\(0 \* image\)\.sum\(\)\.sqrt\(\)` \(.*test_debugging"
    ):
        trained(tiny_config("debug=anomaly"), tmp_path)
