"""A sweep in Python: a loop over settings, and a table at the end.

For those who want a loop of their own, with conditions that a command line cannot say. (A plain grid is
`python -m qnmixer.train -m`, a search is `hydra/sweeper=search`.) Each setting is trained by `train`, which leaves a
run folder. The validation slices choose the setting. The test slices, which chose nothing, say how good it is. A loop
that was stopped goes on where it was. It takes a quarter of a minute on two CPU cores.

    python notebooks/examples/sweep.py FOLDER
"""

import argparse
import csv
import json
from itertools import product
from pathlib import Path
from typing import Any

import qnmixer
from qnmixer.train import train

# Raise these: experiment=demo itself has 64 pixels and 700 steps.
ITERATIONS = 2, 4
LEARNING_RATES = 3e-3, 1.2e-2
STEPS = 20
SMALL = [
    "experiment=demo", "data.image_size=32", "geometry.n_detectors=64", "geometry.detector_pitch=15",
    "model.channels=16", "data.n_train=160", "data.n_val=16", "data.n_test=32", "data.num_workers=0",
    f"trainer.max_steps={STEPS}", f"trainer.val_every_n_steps={STEPS // 2}", "trainer.accelerator=cpu", "logger=csv",
    "callbacks=none", "evaluation.n_pictures=1",  # the table needs no pictures, which take a third of the time here
]  # fmt: skip


def results_of(folder: Path) -> dict[str, Any]:
    """What a run folder says of its run; nothing if there is none yet."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def test_scores(folder: Path) -> dict[str, dict[str, float]]:
    """PSNR of each test slice by method, as the run's evaluation of its best checkpoint wrote it."""
    scores: dict[str, dict[str, float]] = {}
    with (folder / "evaluation" / "images.csv").open(newline="") as stream:
        for line in csv.DictReader(stream):
            scores.setdefault(line["method"], {})[line["slice"]] = float(line["psnr"])
    return scores


def mean(values: dict[str, float]) -> float:
    """The mean over the slices."""
    return sum(values.values()) / len(values)


def row_of(n_iterations: int, rate: float, folder: Path) -> dict[str, Any]:
    """Train one setting, if that is not done, and return its row of the table."""
    if results_of(folder).get("status") != "done":
        # The same command in the same folder resumes: a run that was stopped loses at most a hundred steps.
        train(*SMALL, f"model.n_iterations={n_iterations}", f"optimizer.lr={rate}", f"hydra.run.dir={folder}")
    results, scores = results_of(folder), test_scores(folder)
    return {
        "T": n_iterations,
        "learning rate": rate,
        "weights": sum(weight.numel() for weight in qnmixer.load_pretrained(folder).parameters()),
        "seconds": round(results["seconds"], 1),
        "val PSNR": round(results["best"]["val/psnr"], 2),
        "test PSNR": round(mean(scores["QN-Mixer"]), 2),
        "over FBP": round(mean(scores["QN-Mixer"]) - mean(scores["FBP"]), 2),
    }


def main(folder: Path) -> None:
    """Train all settings, write table.csv, and print the table with the one that validation chooses."""
    rows = []
    for n_iterations, rate in product(ITERATIONS, LEARNING_RATES):
        rows.append(row_of(n_iterations, rate, folder / f"T{n_iterations}_lr{rate}"))
    rows.sort(key=lambda row: row["val PSNR"], reverse=True)
    with (folder / "table.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    print()
    for line in ([*rows[0]], ["---"] * len(rows[0]), *(row.values() for row in rows)):
        print(f"| {' | '.join(map(str, line))} |")
    best = rows[0]
    print(f"chosen by validation: T = {best['T']}, learning rate {best['learning rate']}; {folder / 'table.csv'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/examples/sweep"))
    main(parser.parse_args().folder)
