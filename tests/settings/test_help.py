from pathlib import Path

import pytest

from qnmixer.settings.compose import compose
from qnmixer.settings.help import usage
from qnmixer.settings.options import flat

COMMANDS = {
    "train": [], "evaluate": ["run=x"], "reconstruct": ["run=x", "input=y", "output=z"],
    "export": ["run=x", "output=y.safetensors"], "calibrate": ["input=x", "output=y"], "robustness": ["run=x"],
    "plan": [], "doctor": [],
}  # fmt: skip


def help_of(name: str, *overrides: str) -> list[str]:
    return usage(compose(name, list(overrides), with_hydra=True), name, every_key=True).splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_is_there_and_how_to_begin_comes_first(name: str) -> None:
    lines = help_of(name, *COMMANDS[name])
    assert any(line.startswith(f"python -m qnmixer.{name} ") for line in lines[:5])
    shown = {line.split("=")[0].strip() for line in lines[lines.index("") :] if "=" in line}
    values = compose(name, COMMANDS[name])
    sections = {key.rpartition(".")[0] for key, _ in flat(dict(values))}
    leaves = {key for key, _ in flat(dict(values)) if "." in key and not key.endswith((".name", "._target_"))}
    assert leaves - sections <= shown


def test_the_help_of_train_is_short_and_names_the_rest() -> None:
    text = usage(compose("train", ["model=learn", "+data.root=/ct"], with_hydra=True), "train", every_key=False)
    lines = text.splitlines()
    assert len(lines) < 24
    (model,) = [line for line in lines if line.startswith("  model=learn ")]
    assert " qn_mixer," in model
    (steps,) = [line for line in lines if line.startswith("  trainer.max_steps=")]
    assert steps in help_of("train")
    assert "--help=all" in text


def test_what_a_key_means_and_what_an_option_trades_is_said_beside_it() -> None:
    lines = help_of("train", "data=dicom", "data.root=/ct", "trainer.devices=1", "memory=recompute")
    for start, words in {
        "  data.split=random ": "by patient",  # the comment of a key
        "  memory=recompute *": "memory hardly grows with T",  # that of a file, which is chosen
        "  memory=keep  ": "",
        "  model=fbpconvnet ": "(Jin et al. 2017): a residual U-Net on FBP",
    }.items():
        (found,) = [line for line in lines if line.startswith(start)]
        assert words in found
    assert not [line for line in lines if "as_trained" in line or "data=_" in line]
    assert [line for line in help_of("evaluate", "run=x") if line.startswith("  data=as_trained *")]


def test_a_key_without_a_comment_has_what_the_docstring_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "documented").mkdir()
    (tmp_path / "documented" / "__init__.py").write_text("from .mine import Mine as Net\nraise RuntimeError\n")
    docstring = '"""Mine.\n\n    Args:\n        width (int): of all\n            layers. It is even.\n    """'
    mine = f"from qnmixer.models import LEARN\nclass Mine(LEARN):\n    {docstring}\n"
    (tmp_path / "documented" / "mine.py").write_text(mine)
    monkeypatch.chdir(tmp_path)
    lines = help_of("train", "noise=mixed", "model=custom", "model._target_=documented.Net", "+model.width=4")
    for start, words in {
        "  model.width=4 ": " of all layers",
        "  model.channels=16 ": " C; the plan can vary T and C",  # the comment
        "  noise.photons=100000.0 ": " I₀, counts of an unattenuated ray in the brightest bin",
    }.items():
        assert [line for line in lines if line.startswith(start) and line.endswith(words)]


def test_the_options_that_a_command_has(tmp_path: Path) -> None:
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("# Mine. It is better\n_target_: qnmixer.losses.l1\n")
    (tmp_path / "loss" / "_part.yaml").write_text("# A part\n")
    lines = help_of("train", f"hydra.searchpath=[file://{tmp_path}]")
    assert [line.split(maxsplit=1) for line in lines if line.startswith("  loss=mine")] == [["loss=mine", "Mine"]]
    assert not [line for line in lines if "evaluation=task" in line or "loss=_" in line]
    lines = help_of("evaluate", "run=x", "data=phantoms")
    assert [line for line in lines if line.startswith(("  data=as_trained ", "  evaluation=task "))][1:]
