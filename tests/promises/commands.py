"""The commands on a network that learns in a second, in this process, and what they leave behind."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import torch

from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.evaluate import evaluate
from qnmixer.evaluation.evaluate_config import EvaluateConfig
from qnmixer.reconstruct import check as check_reconstruct
from qnmixer.reconstruct import reconstruct
from qnmixer.reconstruction.writers import write_dicom
from qnmixer.runs.run import into_new_folder, resume_overrides
from qnmixer.settings.run import parse
from qnmixer.train import run as train

from ..conftest import Outcome
from ..saved import TINY as SMALL
from ..saved import run as run_task

COMPLETE = {"train": resume_overrides, "evaluate": partial(into_new_folder, "evaluate")}
COMMANDS: dict[str, Any] = {
    "train": (train, parse),
    "evaluate": (evaluate, EvaluateConfig.parse),
    "reconstruct": (reconstruct, check_reconstruct),
}
SIZE, VIEWS, BINS, STEPS = 32, 8, 48, 4  # the first three are those of SMALL
TINY = [
    *SMALL, "data.num_workers=0", "data.batch_size=2", f"trainer.max_steps={STEPS}", "trainer.val_every_n_steps=2",
    "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "evaluation.n_pictures=1",
]  # fmt: skip
PHANTOMS = ["data.n_train=8", "data.n_val=2", "data.n_test=2"]


def run(name: str, *arguments: str) -> Outcome:
    """A command in this process, through the very code that its module runs."""
    return Outcome(*run_task(*COMMANDS[name], name, *arguments, complete=COMPLETE.get(name, list)))


Command = Callable[..., Outcome]
"""The fixture `command`."""


def training(folder: Path, *overrides: str) -> Outcome:
    """A tiny training run into `folder`, without pictures unless callbacks=default asks for them."""
    phantoms = [] if any(override.startswith("data=") for override in overrides) else PHANTOMS
    return run("train", *TINY, "callbacks=none", *phantoms, *overrides, f"hydra.run.dir={folder}")


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def weights(run_folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run_folder / "checkpoints" / f"{name}.ckpt", weights_only=True)
    return checkpoint["state_dict"]


def slice_hu(number: int, size: int = 48) -> np.ndarray[Any, Any]:
    return phantom(size, seed=0, part="test", index=number)


def write_ct(path: Path, number: int, patient: str, size: int = 48) -> None:
    write_dicom(path, slice_hu(number, size), series_uid=f"1.2.3.{sum(map(ord, patient))}", description="a test")
    dataset = pydicom.dcmread(path)
    dataset.PatientID = patient
    dataset.PatientName = f"Doe^{patient}"
    dataset.ImagePositionPatient = [0, 0, number]
    dataset.save_as(path)


def reconstruction(run_folder: Path, source: Path, output: Path, *options: str) -> Outcome:
    return run("reconstruct", f"run={run_folder}", f"input={source}", f"output={output}", "accelerator=cpu", *options)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
