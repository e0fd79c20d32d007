"""Modules that a command loads, and names that stand in one place only. `lint-imports` checks the rooms."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import qnmixer

from .pages import STUDIES
from .schemas import EXTRAS

SRC = Path(qnmixer.__file__).parent


RECONSTRUCTS = "qnmixer.reconstruction.reconstruct" + ", qnmixer.extras.export.export" * EXTRAS


def test_what_is_not_needed_is_not_loaded() -> None:
    """In one process, the smallest first."""
    code = "import gc; gc.disable(); import sys\n"  # to look for garbage takes half of the time
    for modules, unwanted in (
        ("qnmixer", ["torch", "numpy", "omegaconf", "rich"]),
        ("qnmixer.settings.run", ["torch", "lightning"]),
        (RECONSTRUCTS, ["lightning", "torchmetrics", "matplotlib", "torch._dynamo"]),
    ):
        code += f"import {modules}\nprint(*({{*{unwanted}}} & {{*sys.modules}}))\n"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def files_read_with(path: Path, files: set[Path]) -> set[Path]:
    """A file and the files of qnmixer that it imports, directly or not, but for types. `files`: those seen already."""
    files.add(path)
    code = re.sub(r"^if TYPE_CHECKING:\n(?:    .*\n)+", "", path.read_text(), flags=re.MULTILINE)
    for name in re.findall(r"^\s*from (qnmixer[.\w]*)", code, re.MULTILINE):
        module = SRC.parent / name.replace(".", "/")
        if (file := module / "__init__.py" if module.is_dir() else module.with_suffix(".py")) not in files:
            files_read_with(file, files)
    return files


def test_a_network_is_read_with_few_files() -> None:
    files = files_read_with(SRC / "models" / "qn_mixer.py", set())
    assert SRC / "models" / "bfgs.py" in files
    assert len(files) <= 8
    assert sum(len(path.read_text().splitlines()) for path in files) <= 1500


# Of each library: what its private names look like in code, and the one file that may have them. `make lint` forbids
# every other name with an underscore; it sees neither loops of Lightning, nor attributes of `self`, nor texts.
PRIVATE = {
    "hydra": (r"\bhydra\._internal|\.instance\(\)\.hydra\b", "commands/hydra_private.py"),
    "hydra-optuna-sweeper": (r"hydra_optuna_sweeper\._", "runs/optuna_private.py"),
    "lightning": (
        r"(from|import) lightning[\w.]*(\._\w|\.loops\b)|from lightning[\w.]* import .*\b_\w"  # modules, names
        r"|\b(fit|val|validate|test|predict|epoch|evaluation)_loop\b|\b_batches_that_stepped"  # loops
        r"|\._trainer\b|\btrainer\._\w"  # attributes
        r"|\b_hparams|\._ddp_kwargs|\"_instantiator\"",
        "parallel/lightning_private.py",
    ),
    "multiprocessing": (r"\bmultiprocessing[\w.]*\._|\b_on_queue_feeder_error", "data/multiprocessing_private.py"),
    "torch": (
        r"(from|import) torch[\w.]*\._[a-zA-Z]|\btorch\._[a-zA-Z]|\bTensor\._\w|\b_local_scalar_dense\b"
        r"|\._(cdata|version|step_count|buffers|parameters|modules|non_persistent_buffers_set)\b|\"_schedulers\"",
        "parallel/torch_private.py",
    ),
}


@pytest.mark.parametrize("library", PRIVATE)
def test_one_file_uses_the_private_names_of_a_library(library: str) -> None:
    pattern, file = PRIVATE[library]
    folders = SRC, SRC.parent / "hydra_plugins", STUDIES / "qnmixer_studies"
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert [path for path in files if re.search(pattern, path.read_text())] == [SRC / file]
