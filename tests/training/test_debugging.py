import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qnmixer.fit import fit
from qnmixer.module import ReconstructionModule
from qnmixer.parallel.devices import resolve_devices
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.runs.run import Run
from qnmixer.settings.run import Config

from ..conftest import metrics, tiny_config


def trained(config: Config, folder: Path) -> dict[str, Any]:
    fit(resolve_devices(config), Run(folder))
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.long
def test_overfitting_drives_the_loss_down(tmp_path: Path) -> None:
    options = ["model.n_iterations=3", "model.channels=16", "optimizer.lr=3e-3", "trainer.val_every_n_steps=40"]
    results = trained(tiny_config("debug=overfit", *options, "trainer.max_steps=40"), tmp_path)
    losses = metrics(tmp_path)["train/loss"]
    assert losses[-1] < losses[0] / 3
    assert results["status"] == "done"
    assert "test" not in results


@pytest.mark.slow
@pytest.mark.long  # make test runs debug=few_batches among the commands of docs
def test_few_batches_are_a_whole_run(tmp_path: Path) -> None:
    results = trained(tiny_config("debug=few_batches", "data.n_train=1000", "data.n_test=1000"), tmp_path)
    assert results["status"] == "done"
    assert len((tmp_path / "evaluation" / "images.csv").read_text().splitlines()) == 1 + 2 * 4
    assert load_run(tmp_path).config.data == tiny_config("data.n_train=1000", "data.n_test=1000").data


@pytest.mark.slow
def test_a_profile_is_a_trace_that_viewers_open(tmp_path: Path) -> None:
    options = ["debug.warm_up=2", "debug.steps=1", "trainer.max_steps=4", "trainer.val_every_n_steps=3"]
    trained(tiny_config("debug=profile", *options), tmp_path)
    trace, *_ = sorted((tmp_path / "profile").glob("*training_step*.json"))
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"].startswith("ProfilerStep#") for event in events if event["ph"] == "X") == 1
    (table,) = (tmp_path / "profile").glob("*.txt")
    assert "Self CPU" in table.read_text()


@pytest.mark.slow
def test_anomaly_detection_names_the_operator_and_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_loss(self: ReconstructionModule, batch: Any, batch_idx: int) -> Tensor:
        return (0 * self.network(self.measure(batch, "train"))).sum().sqrt()

    monkeypatch.setattr(ReconstructionModule, "training_step", bad_loss)
    line = r"NaN in MulBackward0 of `.*sum\(\)\.sqrt\(\)` \(.*test_debugging"
    with pytest.raises(FloatingPointError, match=line):
        trained(tiny_config("debug=anomaly"), tmp_path)
