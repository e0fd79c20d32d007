"""The lines before training are those of the method, and those after it can be copied into a shell."""

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from qnmixer.engine.build import build_module
from qnmixer.engine.config import parse
from qnmixer.engine.config.commands import parse_evaluate
from qnmixer.engine.config.compose import compose
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.tracking.run import Run
from qnmixer.engine.training.terminal import print_end, print_start
from qnmixer.engine.training.trainer import build_trainer


def test_a_folder_with_spaces_and_brackets_is_printed_as_a_shell_and_hydra_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ü [red] a"
    run = Run(folder)
    run.record["picture"] = str(folder / "picture.png")
    print_end(parse(compose("train", ["experiment=demo"])), run)
    place, hint, picture = capsys.readouterr().out.splitlines()
    assert (place, picture) == (f"run folder: {folder}", f"picture: {folder / 'picture.png'}")
    words = shlex.split(hint.partition("qnmixer.evaluate ")[2])
    assert parse_evaluate(compose("evaluate", words)).run == str(folder)


@pytest.mark.parametrize(
    ("model", "batch", "said"), [("qn_mixer", 1, " = 1 slice an "), ("qn_mixer", 2, " = 2 slices an "), ("fbp", 1, "")]
)
def test_the_batch_of_a_step_is_printed_for_what_is_trained(tmp_path: Path, model: str, batch: int, said: str) -> None:
    sizes = ["data.image_size=32", f"data.batch_size={batch}", "geometry.n_detectors=48", "geometry.detector_pitch=20"]
    config = parse(compose("train", [*sizes, f"model={model}", "trainer.accelerator=cpu", "logger=csv"]))
    module, data, text = build_module(config), SliceDataModule(config.data), io.StringIO()
    print_start(config, module, data, build_trainer(config, tmp_path, [], []), Console(file=text))
    assert ("an optimizer step" in text.getvalue()) is bool(said)
    assert said in text.getvalue()
