"""Metrics of the user's own: in validation, as the monitored metric, in the final table, and messages."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qnmixer.data.batch import Batch
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import PluginError
from qnmixer.evaluation.metrics import build_metrics, try_metrics
from qnmixer.fit import fit
from qnmixer.models import QNMixer
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.runs.records import read_metrics
from qnmixer.runs.run import Run
from qnmixer.settings.logged_names import taken_names
from qnmixer.settings.run import Config

from ..conftest import tiny_config

MINE = [f"+metrics.mine._target_={__name__}.likeness", "+metrics.mine.mode=min", "+metrics.mine.title=likeness"]


def likeness(image: Tensor, truth: Tensor, scale: float = 1.0) -> Tensor:
    return 1 - scale * (image - truth).abs().mean((1, 2, 3))


def picture(image: Tensor, truth: Tensor) -> Tensor:
    return (image - truth).abs()


def broken(image: Tensor, truth: Tensor) -> Tensor:
    raise ValueError("it takes three channels")


class Picky(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        raise ValueError("width is below 3")


def values(config: Config, image: Tensor, batch: Batch) -> dict[str, list[float]]:
    metrics = build_metrics(config.metrics, config.data.own_range)
    return {name: metric(image, batch).tolist() for name, metric in metrics.items()}


def some(config: Config) -> Batch:
    batch: Batch = next(iter(SliceDataModule(config.data).loader("test")))
    return batch


def test_a_run_validates_and_tests_it_and_keeps_the_lowest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    words = [*MINE, "monitor=val/mine", "trainer.max_steps=6", "test_after_training=true", "optimizer.lr=0.01"]
    words += ["callbacks=default", f"+metrics.type._target_={__name__}.likeness"]  # type: a method of ModuleDict
    best = fit(tiny_config(*words), Run(folder))
    rows = [row for row in read_metrics(folder / "metrics.csv") if row.get("val/mine")]
    found = {int(row["step"]): float(row["val/mine"]) for row in rows}
    assert len(found) == 3
    lowest = min(found, key=lambda step: found[step])
    assert best == pytest.approx(found[lowest])
    assert torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["global_step"] == lowest
    assert float(rows[-1]["val/mine_best"]) == pytest.approx(best)
    record = json.loads((folder / "results.json").read_text())
    assert record["best"] == {"val/mine": best}
    assert 0.5 < record["test"]["QN-Mixer"]["mine"] < 1
    last = read_metrics(folder / "metrics.csv")[-1]
    assert float(last["test/mine"]) == pytest.approx(record["test"]["QN-Mixer"]["mine"])
    assert float(last["test/fbp/mine"]) == pytest.approx(record["test"]["FBP"]["mine"])
    headings = (folder / "evaluation" / "table.csv").read_text().splitlines()[0]
    assert "likeness" in headings
    images = (folder / "evaluation" / "images.csv").read_text().splitlines()[0].split(",")
    assert "mine" in images
    metrics, columns = {"psnr", "ssim", "mine", "type"}, [name.partition("/") for name in last]
    logged = {name.removeprefix("fbp/") for part, _, name in columns if part in ("val", "test")} - metrics
    assert {"loss", "mine_best", "cosine_zs", "window_psnr"} <= logged
    assert logged | ({*images} - metrics) <= taken_names(metrics)  # so no metric has the name of another column
    load_run(folder, "best", (), "metrics.")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of_a_stranger"))
    with pytest.raises(PluginError, match=rf"names metrics\.mine\._target_={__name__}\.likeness"):
        load_run(folder, "best", (), "metrics.")
    assert load_run(folder).config.metrics["mine"].mode == "min"  # its network needs no code of the user


def test_rmse_in_hu() -> None:
    config = tiny_config("metrics=[default,rmse_hu]", "data.hu_max=2000")
    batch = some(config)
    found = values(config, batch["image"] + 0.01, batch)
    assert found["rmse_hu"] == pytest.approx([30.0] * len(batch["image"]), rel=1e-4)
    assert found["psnr"] == pytest.approx([40.0] * len(batch["image"]), rel=1e-4)


@pytest.mark.parametrize("target", [
    "torchmetrics.MeanAbsoluteError", "torchmetrics.functional.mean_absolute_error",
], ids=["class", "function"])  # fmt: skip
def test_a_metric_of_torchmetrics_is_of_each_image(target: str) -> None:
    config = tiny_config(f"+metrics.mae._target_={target}", "+metrics.mae.mode=min")
    batch = some(config)
    image = batch["image"] + torch.tensor([0.1, 0.3])[:, None, None, None]
    for _ in range(2):  # it gathers nothing
        assert values(config, image, batch)["mae"] == pytest.approx([0.1, 0.3], rel=1e-4)


@pytest.mark.parametrize(("words", "message"), [
    (["picture"], f"metrics.mine._target_={__name__}.picture gives a tensor [1, 1, 16, 16] for one image"),
    (["broken"], "fails for images [1, 1, 16, 16] (it takes three channels)"),
    (["Picky", "width=1"], f"metrics.mine._target_={__name__}.Picky refuses its arguments (width is below 3)"),
])  # fmt: skip
def test_a_wrong_metric_is_one_line_before_training(words: list[str], message: str) -> None:
    target, *arguments = words
    config = tiny_config(
        f"+metrics.mine._target_={__name__}.{target}", *(f"+metrics.mine.{argument}" for argument in arguments)
    )
    with pytest.raises(PluginError) as error:
        try_metrics(build_metrics(config.metrics, own_range=False), config.data.image_size)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_what_a_network_tells_is_written_over_no_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QNMixer, "diagnostics", lambda self, state: {"psnr": torch.tensor(99.0)})
    with pytest.raises(PluginError, match=r"QNMixer.diagnostics gives psnr, which a run logs itself: give it another"):
        fit(tiny_config("callbacks=default"), Run(tmp_path / "run"))
