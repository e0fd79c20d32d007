"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

Wrong command lines: each gets one line that names the key, loads no large library and leaves no files.
"""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from ..conftest import environment, python
from ..heavy import path_without
from ..warm import Done, Warm

pytestmark = pytest.mark.slow

TRAIN = {
    # keys that are not there
    "sede=4": "unknown key sede: did you mean seed?",
    "model.n_iteration=3": "unknown key model.n_iteration: did you mean model.n_iterations?",
    "n_views=16": "unknown key n_views: did you mean geometry.n_views?",
    "experiment=demo +=": "experiment=demo += cannot be read",
    # keys of another option
    "data=mixed data.sources.slices.root=. data.sources.slices.val_fraction=0.9": (
        "data.sources.slices.val_fraction + test_fraction leave nothing to train on"
    ),
    # options, and classes of one's own
    "data=dicm": "data=dicm does not exist: did you mean dicom?",
    "-m data=phantoms,dicm": "data=dicm does not exist",
    "data=/path/to/ct": "data=/path/to/ct does not exist: choose custom, deeplesion, dicom",
    "trainer.plugins=x": "trainer.plugins is set by the run itself",
    "ckpt_path=last.ckpt": "ckpt_path=last.ckpt is no checkpoints/last.ckpt of a run, from which a run resumes",
    "~model": "model has no value: give one with model=…",
    "+callbacks.mine.every=5": "callbacks.mine._target_ has no value",
    "logger=custom logger._target_=nowhere.Mine": "logger._target_=nowhere.Mine, but there is no module nowhere",
    # types, bounds, choices
    "seed=abc": "seed=abc should be a valid integer",
    "geometry.n_views=0": "geometry.n_views=0 should be greater than or equal to 1",
    "optimizer.lr=nan": "optimizer.lr=nan should be a finite number",
    "optimizer=sgd optimizer.momentum=-1": "torch.optim.SGD refuses its arguments (Invalid momentum value: -1.0)",
    "monitor=val/pnsr": "monitor=val/pnsr is not known: choose val/psnr, val/ssim, val/loss",
    "trainer.precision=64": "trainer.precision=64 should be '32', '16-mixed' or 'bf16-mixed'",
    # rules between keys
    "data.image_size=30": "data.image_size=30 is not divisible by model.patch_size=4",
    "model.channels=10": "model.channels=10 should be a multiple of 4",
    "finetune=. resume=a_file": "finetune",
    "evaluation.window=[240,-160]": "evaluation.window=[240.0, -160.0] is not [low, high]",
    "noise=physical data.scaling=minmax": "noise=physical needs",
    "debug=profile trainer.max_steps=4": "trainer.max_steps=4 ends before debug=profile has its steps",
    "callbacks=early_stopping trainer.limit_val_batches=0": "no validation for callbacks.early_stopping",
    "model=tv trainer.limit_val_batches=0": "no validation for model=tv, which has no weights",
    "monitor=val/psnr/A": "monitor=val/psnr/A is not known",
    # strategies
    "trainer.devices=2": "strategy=single has one device, not 2",
    "strategy=ddp trainer=torchrun": "trainer.num_nodes=2, but nothing has been started on other nodes: conf/trainer/",
    "strategy=pipeline trainer.devices=4 data.batch_size=7 strategy.microbatch_size=8": "strategy.schedule=1f1b cannot",
    # what is not there, or has no value
    "data=dicom": "data.root has no value: give one with data.root=…",
    "data=dicom data.root=nowhere": "data.root=nowhere does not exist",
    "resume=nowhere": "nowhere",
    "data.image_size=${oc.env:NOT_SET_ANYWHERE}": "data.image_size",
    # grammar
    "data.image_size": "data.image_size cannot be read as KEY=VALUE (missing EQUAL at",
    "data=dicom data.root=/my ct": "ct cannot be read as KEY=VALUE",
    "data=dicom data.root=/home/josé": "data.root=/home/josé does not exist",
    "seed=1,2": "seed=1,2",
    "-m sede=1,2": "unknown key sede: did you mean seed?",
}  # fmt: skip

OTHERS = {
    "evaluate": "run has no value: give one with run=…",
    "evaluate run=nowhere": "run=nowhere does not exist",
    "evaluate run=. split=tset": "split=tset should be 'train', 'val' or 'test'",
    "evaluate run=. model.n_iterations=3": "unknown key model.n_iterations",
    "compare sweep=. evaluation.tv_weight=9e-5": "unknown key evaluation.tv_weight",
    "reconstruct run=. input=nowhere output=out": "input=nowhere does not exist",
    "reconstruct run=. input=. output=out formats=[dcom]": "formats=dcom should be 'dicom', 'npy' or 'png'",
    "export run=. output=a_file": "output=a_file does not name a weights file: give a name that ends in .safetensors",
    "export run=pretrained.safetensors output=a.safetensors": "is a weights file already",
    "plan strategy=pipeline trainer.devices=99": "trainer.devices=99 gives more stages than model.n_iterations=14",
    "plan device=V1000-16": "device=V1000-16 is not known: did you mean V100-16?",
    "doctor format=yaml": "format=yaml should be 'table' or 'json'",
    "doctor trainer.device=4": "unknown key trainer.device: did you mean trainer.devices?",
}

CASES = {**{f"train {arguments}": message for arguments, message in TRAIN.items()}, **OTHERS}


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH without large libraries."""
    return path_without(tmp_path_factory.mktemp("light"))


def check(case: str, process: Done, folder: Path) -> None:
    assert (process.returncode, process.stdout) == (1, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")
    assert CASES[case] in line
    assert os.listdir(folder) == ["a_file"]


def command_of(case: str, folder: Path, light: str) -> tuple[list[str], dict[str, str]]:
    """Arguments of Python, and the environment."""
    (folder / "a_file").touch()
    name, *arguments = shlex.split(case) if "='" not in case else case.split()
    return ["-m", f"qnmixer.{name}", *arguments], environment(PYTHONPATH=light)


ONE_OF_EACH = [*{case.split()[0]: case for case in CASES}.values()]


@pytest.mark.parametrize("case", CASES)
def test_one_line_at_once(case: str, cold: Warm, light: str, tmp_path: Path) -> None:
    arguments, variables = command_of(case, tmp_path, light)
    process = cold.run(*arguments, cwd=tmp_path, env=variables, timeout=60)
    check(case, process, tmp_path)


EACH = """
import importlib, json, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        importlib.import_module(sys.argv[0]).main()
    except SystemExit as end:
        print(end.code)
"""


def test_commands_in_a_python_of_its_own_say_the_same(light: str, tmp_path: Path) -> None:
    """From the start of Python on."""
    commands = [command_of(case, tmp_path, light)[0][1:] for case in ONE_OF_EACH]
    process = python(tmp_path, "-c", EACH, json.dumps(commands), PYTHONPATH=light)
    for case, code, line in zip(ONE_OF_EACH, process.stdout.split(), process.stderr.splitlines(), strict=True):
        check(case, Done([], int(code), "", line), tmp_path)


@pytest.mark.parametrize("case", [
    "reconstruct run=pretrained output=out input=ct/a.nii.gz", "reconstruct run=pretrained output=out input=ct",
    "train data=dicom data.root=ct", "evaluate run=pretrained data=numpy data.root=ct",
])  # fmt: skip
def test_nifti_is_refused(case: str, cold: Warm, light: str, tmp_path: Path) -> None:
    """As one file, and in a folder without other files."""
    for name in ("a.nii.gz", "deep/B.NII"):
        path = tmp_path / "ct" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"any")
    arguments, variables = command_of(case, tmp_path, light)
    process = cold.run(*arguments, cwd=tmp_path, env=variables, timeout=60)
    assert (process.returncode, process.stdout) == (1, "")
    (line,) = process.stderr.splitlines()
    assert re.search(r"^error: .*(input|root)=ct.* is NIfTI, which qnmixer cannot read: .* convert it to \.npy", line)
    assert {*os.listdir(tmp_path)} == {"a_file", "ct"}
