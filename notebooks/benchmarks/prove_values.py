"""Digests that a change of layout must not change: of losses, names of weights, and the help of each command.

python notebooks/benchmarks/prove_values.py > before.txt     # then move things, run it again and compare
"""

import argparse
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

COMMANDS = ("train", "evaluate", "compare", "reconstruct", "export", "plan", "doctor")
SETTING = [
    "experiment=demo", "data.image_size=32", "data.n_train=40", "data.n_val=2", "data.n_test=2", "data.batch_size=2",
    "data.num_workers=0", "model.channels=8", "trainer.val_every_n_steps=10", "trainer.log_every_n_steps=1",
    "trainer.accelerator=cpu", "logger=csv",
]  # fmt: skip
RANKS = ["trainer.devices=2"]
RUNS = {
    "keep": ["memory=keep"],
    "recompute": ["memory=recompute"],
    "ddp": ["strategy=ddp", *RANKS],
    "pipeline": ["strategy=pipeline", *RANKS],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    for command in COMMANDS:
        print(f"--help {command:<12} {digest(python('-m', f'qnmixer.{command}', '--help=all'))}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name, overrides in RUNS.items():
            folder = Path(temporary) / name
            python("-m", "qnmixer.train", *SETTING, *overrides, f"trainer.max_steps={steps}", f"hydra.run.dir={folder}")
            print(f"{name:<19} losses {digest(losses(folder))} weights {digest(weights(folder))}", flush=True)
        plan = python("-m", "qnmixer.plan", *SETTING, "format=json")
        print(f"plan                {digest(plan)}")


def python(*arguments: str) -> str:
    """What such a command prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout


def losses(folder: Path) -> str:
    """Every loss that was logged, to the last bit."""
    with (folder / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    return "\n".join(float(row[key]).hex() for row in rows for key in ("train/loss", "val/loss") if row[key])


def weights(folder: Path) -> str:
    """Names in the state dict of the last checkpoint, in their order, and shapes."""
    state = torch.load(folder / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)["state_dict"]
    return "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in state.items())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
