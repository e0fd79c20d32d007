"""The lines before training are those of the method."""

import io
from pathlib import Path

import pytest

from qnmixer.engine.build import build_module
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.reports.terminal import Console
from qnmixer.engine.training.steps import build_trainer
from qnmixer.engine.training.terminal import print_start

EIGHT = ["data.n_train=8", "trainer.max_steps=-1", "trainer.val_every_n_steps=null"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=fbp"], ""),
        (["trainer.max_steps=4", "data.n_train=16"], "training ends after 4 steps\n"),
        ([*EIGHT, "trainer.max_epochs=1", "trainer.max_steps=3"], "ends after 3 steps or 1 epochs\n"),
    ],
)
def test_batch_and_limit_are_printed_for_what_is_trained(tmp_path: Path, words: list[str], said: str) -> None:
    printed = start(tmp_path, *words)
    assert ("an optimizer step" in printed) is bool(said)
    assert said in printed


def start(folder: Path, *words: str) -> str:
    """The lines before training."""
    sizes = ["data.image_size=32", "data.batch_size=2", "geometry.n_detectors=48", "geometry.detector_pitch=20"]
    config = parse(compose("train", [*sizes, *words, "trainer.accelerator=cpu", "logger=csv"]))
    module, data, text = build_module(config), SliceDataModule(config.data), io.StringIO()
    print_start(config, module, data, build_trainer(config, folder, [], []), Console(file=text, width=500))
    return text.getvalue()
