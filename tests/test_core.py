"""A copy of the repository without its optional parts, `extras/` and `qnmixer_studies/`.

It trains and resumes, its run is used, and tests of the core pass.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from .conftest import PHANTOMS, TINY, python
from .pages import ROOT

CORE = [
    "module/test_build.py", "module/test_build_own.py", "models", "physics/test_geometry.py", "runs/test_records.py",
]  # fmt: skip


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    for name in ("src", "conf", "tests", "docs", "notebooks", ".ci", ".github"):
        ignored = shutil.ignore_patterns("extras", "qnmixer_studies", "__pycache__", "*.egg-info", "local", ".*cache")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    assert not (folder / "src" / "qnmixer" / "extras").exists()
    # Else Python would find the studies of this checkout, if it is installed.
    elsewhere = f"import sys; sys.path = [path for path in sys.path if path != {str(ROOT / 'src')!r}]"
    (folder / "src" / "sitecustomize.py").write_text(elsewhere)
    return folder


WORDS = [*TINY, *PHANTOMS, "test_after_training=true", "hydra.run.dir=run"]


@pytest.mark.long
def test_the_run_is_resumed_and_evaluated_and_reconstructs(core: Path) -> None:
    run = "hydra.run.dir=resumed"
    for arguments in ([*WORDS, run], ["resume=resumed", "trainer.max_steps=6"]):
        done = python(core, "-m", "qnmixer.train", *arguments, PYTHONPATH=f"{core}/src")
        assert done.returncode == 0, done.stderr
        assert "QN-Mixer over FBP" in done.stdout
    np.save(core / "slice.npy", np.pad(np.zeros((8, 8)), 4, constant_values=-1000))
    for name, words in (("evaluate", ["hydra.run.dir=scores"]), ("reconstruct", ["input=slice.npy", "output=images"])):
        done = python(core, "-m", f"qnmixer.{name}", "run=resumed", "accelerator=cpu", *words, PYTHONPATH=f"{core}/src")
        assert done.returncode == 0, done.stderr
    assert (core / "scores" / "table.md").is_file()
    assert [*(core / "images").iterdir()]


EACH = """
import os, runpy, sys
import qnmixer.commands.command, qnmixer.settings.run
for line in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = line.split()
        runpy.run_module(f"qnmixer.{sys.argv[0]}", run_name="__main__", alter_sys=True)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
NEEDS_EXTRAS = [
    "compare sweep=sweep", "robustness run=pretrained", "calibrate input=a output=b", "export run=a output=b",
    "evaluate run=pretrained evaluation=task", "evaluate run=pretrained evaluation=uncertainty symmetries=8",
    "train data=lodopab data.root=.",
]  # fmt: skip


@pytest.mark.slow
def test_what_needs_extras_is_one_line(core: Path) -> None:
    refused = python(core, "-c", EACH, *NEEDS_EXTRAS, PYTHONPATH=f"{core}/src")
    assert (refused.returncode, refused.stdout) == (0, "1\n" * len(NEEDS_EXTRAS)), refused.stderr
    lines = refused.stderr.splitlines()
    assert len(lines) == len(NEEDS_EXTRAS)
    line_of_left_out = re.compile(
        r".* needs (qnmixer\.extras|qnmixer_studies), which this copy does not have: install qnmixer anew"
    )
    assert [line for line in lines if not line_of_left_out.fullmatch(line)] == []


@pytest.mark.slow
def test_all_other_tests_are_collected(core: Path) -> None:
    words = ["--collect-only", "-qq", "--assert=plain"]  # to rewrite them takes seconds
    done = python(core, "-m", "pytest", *words, PYTHONPATH=f"{core}/src")
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_its_own_tests_pass(core: Path) -> None:
    words = ["-m", "not slow and not long", *(f"tests/{name}" for name in CORE)]
    done = python(core, "-m", "pytest", *words, PYTHONPATH=f"{core}/src")
    assert done.returncode == 0, done.stdout
