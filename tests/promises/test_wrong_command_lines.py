"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

Wrong command lines: each gets one line that names the key, loads no large library and leaves no files.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import environment
from ..heavy import path_without
from ..warm import Done, Warm

pytestmark = pytest.mark.slow

TRAIN = {
    # keys that are not there
    "sede=4": "unknown key sede: did you mean seed?",
    "+sede=4": "unknown key sede: did you mean seed?",
    "model.n_iteration=3": "unknown key model.n_iteration: did you mean model.n_iterations?",
    "n_views=16": "unknown key n_views: did you mean geometry.n_views?",
    "optimiser=adamw": "unknown key optimiser: did you mean optimizer?",
    "hydra.foo=3": "unknown key hydra.foo",
    "experiment=demo +=": "+= has no key: write KEY=VALUE",
    "evaluation.foo=1": "unknown key evaluation.foo: choose evaluation.n_pictures, ",
    # keys of another option
    "data.root=/ct": (
        "data.root works with data=deeplesion or dicom or helix2fan or lodopab or numpy or two_detect only"
    ),
    "+loss.ssim_weight=0.3": "loss.ssim_weight works with loss=ssim_mix only",
    "data=mixed data.sources.slices.root=. data.sources.slices.val_fraction=0.9": (
        "data.sources.slices.val_fraction + test_fraction leave nothing to train on"
    ),
    "optimizer=sgd optimizer.betas=[0.9,0.99]": "optimizer.betas works with optimizer=adamw or muon only",
    "debug.steps=3": "debug.steps works with debug=profile only",
    # options and groups that are not there
    "data=dicm": "data=dicm does not exist: did you mean dicom?",
    "data=as_trained": "data=as_trained is for evaluate, not for train: choose deeplesion",
    "model.name=learn": "model.name is no key: choose an option by its name, as in model=",
    "data=/path/to/ct": "data=/path/to/ct does not exist: choose custom, deeplesion, dicom",
    "~model": "the config has no model",
    # arguments of Lightning's Trainer
    "trainer.plugins=x": "trainer.plugins is set by the run itself",
    # habits from elsewhere
    "trainer=ddp": "trainer=ddp is not known here: use strategy=ddp",
    "ckpt_path=last.ckpt": "ckpt_path=last.ckpt is no checkpoints/last.ckpt of a run, from which a run resumes",
    "trainer.strategy=ddp": "trainer.strategy is a group of its own: give strategy=, as in strategy=ddp",
    "logger=many_loggers": "logger=many_loggers is not known here: use logger=[wandb,tensorboard]",
    "optimizer.learning_rate=1": "optimizer.learning_rate is not known here: use optimizer.lr=…",
    "logger=custom logger._target_=nowhere.Mine": "logger._target_=nowhere.Mine, but there is no module nowhere",
    "tags=paper": "tags",
    # callbacks
    "callbacks=early_stopping callbacks.early_stopping.patiense=3": "did you mean callbacks.early_stopping.patience?",
    "+callbacks.mine.every=5": "callbacks.mine names no class: give +callbacks.mine._target_=my_file.MyClass",
    # types, bounds, choices
    "seed=abc": "seed=abc should be a valid integer",
    "data.image_size=32.5": "data.image_size",
    "trainer={a:1}": "trainer",
    "trainer.max_steps=null": "trainer.max_steps",
    "seed=-1": "seed=-1 should be greater than or equal to 0",
    "geometry.n_views=0": "geometry.n_views=0 should be greater than or equal to 1",
    "optimizer.lr=nan": "optimizer.lr=nan should be a finite number",
    "optimizer=sgd optimizer.momentum=-1": "torch.optim.SGD refuses its arguments (Invalid momentum value: -1.0)",
    "monitor=val/pnsr": "monitor=val/pnsr is not known: choose val/psnr, val/ssim, val/loss",
    "trainer.precision=64": "trainer.precision=64 should be '32', '16-mixed' or 'bf16-mixed'",
    # rules between keys
    "data.image_size=30": "data.image_size=30 is not divisible by model.patch_size=4",
    "model.channels=10": "model.channels=10 should be a multiple of 4",
    "model.latent_channels=17": "model: latent_channels=17 is more than",
    "finetune=. resume=a_file": "finetune",
    "trainer.max_steps=-1": "trainer.max_steps",
    "evaluation.window=[240,-160]": "evaluation.window=[240.0, -160.0] is not [low, high]",
    "noise=physical data.scaling=minmax": "noise=physical needs",
    "debug=profile trainer.max_steps=4": "nothing would be profiled: raise trainer.max_steps=4",
    # strategies
    "trainer.devices=2": "trainer.devices=2 with trainer.num_nodes=1 does not work with strategy=single",
    "strategy=ddp trainer=torchrun": "trainer.num_nodes=2, but nothing has been started on other nodes: conf/trainer/",
    "strategy=fsdp optimizer=adafactor": "optimizer=adafactor",
    "strategy=pipeline trainer.devices=1": "strategy=pipeline needs at least two devices",
    "strategy=pipeline trainer.devices=15": "15 stages are more than model.n_iterations=14",
    "strategy=pipeline trainer.devices=4 strategy.microbatch_size=2": "strategy.schedule=1f1b",
    "strategy=pipeline trainer.devices=4 data.batch_size=7 strategy.microbatch_size=8": "strategy.schedule=1f1b cannot",
    # what is not there, or has no value
    "data=dicom": "data.root has no value: give one with data.root=…",
    "data=dicom data.root=nowhere": "data.root=nowhere does not exist",
    "data=numpy data.root=a_file": "data.root=a_file is a file",
    "resume=nowhere": "nowhere",
    "data.image_size=${oc.env:NOT_SET_ANYWHERE}": "data.image_size",
    # grammar
    "data.image_size": "data.image_size is not KEY=VALUE",
    "demo": "demo is not KEY=VALUE: write experiment=demo",
    "data=dicom data.root=/my ct": "ct is not KEY=VALUE: leave out blanks around the =, and put quotes around",
    "--optimizer.lr 3": "--optimizer.lr is not an option: write optimizer.lr=3",
    "data=dicom data.root=/home/josé": "data.root=/home/josé does not exist",
    "seed = 3": "= has no key: write KEY=VALUE, without blanks around the =",
    "=3": "=3",
    "seed=1,2": "seed=1,2",
    "-m sede=1,2": "unknown key sede: did you mean seed?",
    "-m data=phantoms,dicm": "data=dicm does not exist",
}  # fmt: skip

OTHERS = {
    "evaluate": "run has no value: give one with run=…",
    "evaluate run=nowhere": "run=nowhere does not exist",
    "compare sweep=. evaluation=[]": "the config has no evaluation",
    "evaluate run=. noise=[]": "the config has no noise: choose one with noise=…",
    "evaluate run=. split=tset": "split=tset should be 'train', 'val' or 'test'",
    "evaluate run=. model.n_iterations=3": "model.n_iterations comes from the run",
    "evaluate run=. data.split=all": "data.split comes from the run and cannot change in evaluate: leave it out, or",
    "evaluate run=. evaluation.n_picture=5": "unknown key evaluation.n_picture: did you mean evaluation.n_pictures?",
    "compare sweep=. evaluation.tv_weight=9e-5": "evaluation.tv_weight is not known here: train model=tv in the sweep",
    "evaluate run=. data.root=nowhere": "data.root=nowhere does not exist: give the folder with the run's slices",
    "reconstruct run=. input=.": "output has no value: give one with output=…",
    "reconstruct run=. /path out": "/path is not KEY=VALUE",
    "reconstruct run=. input=nowhere output=out": "input=nowhere does not exist",
    "reconstruct run=. input=. output=out formats=[dcom]": "formats=dcom should be 'dicom', 'npy' or 'png'",
    "export run=.": "output has no value: give one with output=…",
    "export run=. output=a_file": "output=a_file does not name a weights file: give a name that ends in .safetensors",
    "export run=pretrained.safetensors output=a.safetensors": "is a weights file already",
    "plan device=V1000-16": "device=V1000-16 is not known: did you mean V100-16?",
    "plan formt=json": "unknown key formt: did you mean format?",
    "doctor format=yaml": "format=yaml should be 'table' or 'json'",
    "doctor trainer.device=4": "unknown key trainer.device: did you mean trainer.devices?",
}

CASES = {**{f"train {arguments}": message for arguments, message in TRAIN.items()}, **OTHERS}


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH without large libraries."""
    return path_without(tmp_path_factory.mktemp("light"))


def check(case: str, done: Done, folder: Path) -> None:
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert CASES[case] in line
    assert os.listdir(folder) == ["a_file"]


def command_of(case: str, folder: Path, light: str) -> tuple[list[str], dict[str, str]]:
    """Arguments of Python, and the environment."""
    (folder / "a_file").touch()
    name, *arguments = shlex.split(case) if "='" not in case else case.split()
    return ["-m", f"qnmixer.{name}", *arguments], environment(PYTHONPATH=light)


@pytest.mark.parametrize("case", CASES)
def test_one_line_at_once(case: str, cold: Warm, light: str, tmp_path: Path) -> None:
    arguments, variables = command_of(case, tmp_path, light)
    done = cold.run(*arguments, cwd=tmp_path, env=variables, timeout=60)
    check(case, done, tmp_path)


@pytest.mark.parametrize("case", {case.split()[0]: case for case in CASES}.values())
def test_a_command_of_its_own_says_the_same(case: str, light: str, tmp_path: Path) -> None:
    """One of each, from the start of Python on."""
    arguments, variables = command_of(case, tmp_path, light)
    words = [sys.executable, *arguments]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=variables)
    check(case, Done(done.returncode, done.stdout, done.stderr), tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        "reconstruct run=pretrained output=out input=ct/a.nii.gz",
        "reconstruct run=pretrained output=out input=ct",
        "train data=dicom data.root=ct",
        "evaluate run=pretrained data=numpy data.root=ct",
    ],
)
def test_nifti_is_refused(case: str, cold: Warm, light: str, tmp_path: Path) -> None:
    """As one file, and in a folder without other files."""
    for name in ("a.nii.gz", "deep/B.NII"):
        path = tmp_path / "ct" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"any")
    arguments, variables = command_of(case, tmp_path, light)
    done = cold.run(*arguments, cwd=tmp_path, env=variables, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.search(r"^error: .*(input|root)=ct.* is NIfTI, which qnmixer cannot read: .* convert it to \.npy", line)
    assert {*os.listdir(tmp_path)} == {"a_file", "ct"}
