import os
import subprocess
import sys
from pathlib import Path

import pytest

from qnmixer.cli.help import usage
from qnmixer.config.compose import compose
from qnmixer.config.keys import flat_keys
from qnmixer.config.search_path import CONF

COMMANDS = {
    "train": [],
    "evaluate": ["run=x"],
    "reconstruct": ["run=x", "input=y", "output=z"],
    "export": ["run=x", "output=y.safetensors"],
    "plan": [],
    "doctor": [],
}


def help_of(name: str, *overrides: str) -> list[str]:
    return usage(compose(name, list(overrides), with_hydra=True), CONF, name).splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_is_there_and_how_to_begin_comes_first(name: str) -> None:
    lines = help_of(name, *COMMANDS[name])
    assert any(line.startswith(f"python -m qnmixer.{name} ") for line in lines[:5])
    shown = {line.split("=")[0].strip() for line in lines[lines.index("") :] if "=" in line}
    values = compose(name, COMMANDS[name])
    leaves = {key for key in flat_keys(dict(values)) if "." in key and not key.endswith((".name", "._target_"))}
    assert leaves <= shown


def test_what_a_key_means_is_said_beside_it() -> None:
    lines = help_of("train", "data=dicom", "data.root=/ct", "trainer.devices=1")
    (split,) = [line for line in lines if line.startswith("  data.split=random ")]
    assert "by patient" in split
    (devices,) = [line for line in lines if line.startswith("  trainer.devices=1 ")]
    assert "null: all GPUs" in devices


def test_options_say_what_they_trade_and_which_is_chosen() -> None:
    lines = help_of("train", "memory=recompute")
    (chosen,) = [line for line in lines if line.startswith("  memory=recompute *")]
    assert "memory hardly grows with T" in chosen
    assert [line for line in lines if line.startswith("  memory=keep  ")]
    assert not [line for line in lines if "as_trained" in line or "data=_" in line]
    assert [line for line in help_of("evaluate", "run=x") if line.startswith("  data=as_trained *")]


def test_each_option_has_one_sentence_that_is_not_cut() -> None:
    lines = help_of("train")
    start = lines.index("GROUPS (* is the current choice)") + 1
    options = lines[start : lines.index("", start)]
    assert len(options) > 40
    for line in options:
        assert len(line) <= 120, line
        assert line[35:], line
        assert not line.endswith("…"), line
    (unet,) = [line for line in options if line.startswith("  model=fbpconvnet ")]
    assert "(Jin et al. 2017): a residual U-Net on FBP" in unet


ASK = """
eval "$(qnmixer-train -sc install=bash)"
COMP_LINE="qnmixer-train $1" COMP_WORDS=(qnmixer-train "$1") COMP_CWORD=1
hydra_bash_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the console script, as pip writes it, and torch as a module that fails to import."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "qnmixer-train"
    script.write_text(f"#!{sys.executable}\nfrom qnmixer.train import main\nmain()\n")
    script.chmod(0o755)
    (folder / "torch.py").write_text("raise ZeroDivisionError")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("strategy=", ["strategy=ddp", "strategy=fsdp", "strategy=pipeline", "strategy=single"]),
        ("schedule.w", ["schedule.warmup="]),
        ("debug=o", ["debug=off", "debug=overfit"]),
    ],
)
def test_bash_completes(installed: Path, tmp_path: Path, typed: str, offered: list[str]) -> None:
    environment = os.environ | {"PATH": f"{installed}:{os.environ['PATH']}", "PYTHONPATH": str(installed)}
    result = subprocess.run(
        ["bash", "-c", ASK, "bash", typed], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stderr == ""
    assert sorted(result.stdout.split()) == offered


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--info", "defaults"]], ids=" ".join)
def test_questions_are_answered_without_torch(installed: Path, tmp_path: Path, flags: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "qnmixer.train", *flags], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert "n_iterations" in result.stdout or "qn_mixer" in result.stdout
    assert not list(tmp_path.iterdir())
