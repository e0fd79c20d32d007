"""Promise 5: Sweeps: a process tree a job, resumable, one bad job does not stop the rest. W&B offline, same names for
every method, nothing private.

Files for others name no folder, user, host, patient or secret: the tests plant these and search for them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import environment, python
from .commands import TINY as COMMON
from .commands import Command, write_ct

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sharing")]

REPOSITORY = Path(__file__).parents[2]
USER, HOST, PATIENT, KEY, SECRET = "annaschmidt", "host-of-radiology", "JanetDoe", "key0" * 10, "word-that-nobody-knows"
TINY = [
    *(word for word in COMMON if not word.startswith(("logger", "trainer.max"))), "trainer.max_steps=2", "data=dicom",
    "data.split=explicit", "data.test_patients=[JanetDoe0]", "data.val_patients=[JanetDoe1]",
    "logger=wandb", "+logger.hparams._target_=lightning.pytorch.loggers.CSVLogger",
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home: slices of patients, and a checkout in which there are secrets."""
    home = tmp_path_factory.mktemp("home") / USER
    for p in range(3):
        for k in range(2):
            write_ct(home / "ct" / f"{PATIENT}{p}" / f"{PATIENT}_{k}.dcm", 2 * p + k, f"{PATIENT}{p}", size=32)
    checkout = home / "qnmixer"
    for name in ("src", "conf"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(REPOSITORY / name, checkout / name, symlinks=True, ignore=ignored)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, *words], cwd=checkout, check=True, env=environment(), capture_output=True)
    (checkout / "conf" / ".env").write_text(f"WANDB_API_KEY={SECRET}\n")
    (checkout / "src" / "qnmixer" / "local_settings.py").write_text(f"PASSWORD = '{SECRET}'\n")
    (checkout / "src" / "qnmixer" / "notes.txt").write_text(f"{SECRET}\n")
    (checkout / "src" / "qnmixer" / "mine.py").write_text("# a loss of mine\n")
    return home


@pytest.fixture(scope="module")
def shared(home: Path, command: Command) -> list[Path]:
    """What train, evaluate, compare and export write for others."""
    variables = {
        "HOME": str(home), "USER": USER, "LOGNAME": USER, "WANDB_HOST": HOST, "WANDB_USERNAME": USER,
        "WANDB_API_KEY": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip
    run, sweep = home / "sweep" / "0", home / "sweep"
    data = [f"data.root={home / 'ct'}", f"data.cache_dir={home / 'cache'}"]
    train, path = ["-m", "qnmixer.train", *TINY, *data, f"hydra.run.dir={run}"], str(home / "qnmixer" / "src")
    process = python(home, *train, **variables, PYTHONPATH=path)
    assert process.returncode == 0, process.stderr
    evaluation, weights_file = home / "evaluated", home / "given" / "weights.safetensors"
    description = {"overrides": data, "varying": [], "git_commit": None, "jobs": {"0": [*TINY, *data]}}
    (sweep / "sweep.json").write_text(json.dumps(description))
    cpu = "accelerator=cpu"
    for words in (
        ["evaluate", f"run={run}", f"hydra.run.dir={evaluation}", cpu],
        ["compare", f"sweep={sweep}", cpu],
        ["export", f"run={run}", f"output={weights_file}"],
    ):
        outcome = command(home, *words, **variables)
        assert outcome.code == 0, outcome.stderr
    tables = ["page.html", "picture.png", "table.csv", "table.md"]
    paths = [folder / name for folder in (run / "evaluation", evaluation) for name in tables]
    paths += [sweep / "comparison" / f"comparison.{kind}" for kind in ("html", "md", "csv", "png")]
    paths += [*weights_file.parent.iterdir(), *(run / "pictures").iterdir(), run / "code.diff"]
    (offline_run,) = (run / "wandb").glob("offline-run-*")
    paths += [path for path in [*offline_run.glob("*.wandb"), *offline_run.glob("files/**/*")] if path.is_file()]
    paths += [*run.rglob("hparams.yaml")]
    return paths


@pytest.mark.extras
def test_nothing_that_is_shared_names_anybody(home: Path, shared: list[Path]) -> None:
    names = {path.name for path in shared}
    assert {"page.html", "code.diff", "hparams.yaml", "weights.safetensors", "comparison.html"} <= names
    assert any(name.endswith(".wandb") for name in names)
    host = os.uname().nodename
    words = [str(home), str(home.parent), str(REPOSITORY), sys.prefix, USER, HOST, PATIENT, KEY, SECRET]
    words += [host] * (len(host) > 4)  # a shorter one may stand in any picture
    leaks = [(path.name, word) for path in shared for word in words if word.encode() in path.read_bytes()]
    assert not leaks
    run = home / "sweep" / "0"  # beside it there is what names them: the words were planted where they are read
    assert str(home) in (run / "results.json").read_text()
    assert PATIENT in (run / "evaluation" / "images.csv").read_text()
    assert "a loss of mine" in (run / "code.diff").read_text()
    assert "code.diff" not in {path.name for path in shared if "wandb" in path.parts}
