"""The page of an evaluation."""

from pathlib import Path

import torch

from qnmixer.engine.config import Config, to_plain, without_places
from qnmixer.engine.evaluation.scores import Evaluation
from qnmixer.engine.reports.tables import Table
from qnmixer.engine.tracking.loggers import device_name
from qnmixer.engine.tracking.results import git_commit, versions
from qnmixer.engine.tracking.run import name_of_run
from qnmixer.extras.page.page import write_page


def write(path: Path, evaluation: Evaluation, title: str, config: Config, device: torch.device, run: Path) -> None:
    """Write the page of an evaluation, as `write_evaluation` describes it."""
    method, n_images, n_kept = evaluation.methods[-1], evaluation.n_images, len(evaluation.slices)
    size, (low, high) = config.data.image_size, config.evaluation.window
    lines = [f"Warning: {line}." for line in evaluation.warnings()]
    lines += [f"{evaluation.gain()}. The window is {low:g} to {high:g} HU.".replace(" -", " −")]
    order = f"worst first by PSNR of {method}"
    if n_kept < n_images:
        order += f": {n_kept} of {n_images}, the worst and those of the picture; images.csv has all"
    drawn = [k for k, number in enumerate(evaluation.slices) if number in evaluation.pictured]
    write_page(
        path,
        f"{method}, run {name_of_run(run)}",
        [Table(f"Mean ± standard deviation over {n_images} slices", *evaluation.table(), " ".join(lines))],
        [*evaluation.slices.values()],
        {
            "commit": git_commit() or "none",
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
            "hardware": device_name(device.type),
        },
        subtitle=f"{title}, {size} × {size} pixels",
        configuration=to_plain(without_places(config)),
        order=order,
        opened=drawn[len(drawn) // 2] if drawn else 0,
    )
