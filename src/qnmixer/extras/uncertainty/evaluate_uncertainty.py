"""The command `qnmixer.evaluate evaluation=uncertainty`: a table of coverage on validation and on test patients."""

from pathlib import Path
from statistics import mean

import numpy as np
import torch

from qnmixer.data.batch import to_hu
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError
from qnmixer.evaluation.evaluate import evaluated_source
from qnmixer.evaluation.evaluate_run import on_test
from qnmixer.evaluation.logs import name_in_logs
from qnmixer.evaluation.statistics import half_width
from qnmixer.extras.uncertainty.coverage import GROUPS, by_patient, coverages, covered_by, factor_for
from qnmixer.extras.uncertainty.uncertainty_config import EvaluateUncertaintyConfig
from qnmixer.files import write_text
from qnmixer.parallel.devices import choose_device
from qnmixer.physics import Symmetry, images_by_symmetry
from qnmixer.reconstruction.cures import Cures
from qnmixer.reconstruction.pretrained import digest_of_weights
from qnmixer.reconstruction.reconstructor import Reconstructor, symmetries_of
from qnmixer.runs.loggers import recording_scores
from qnmixer.runs.tables import Table, in_digits
from qnmixer.runs.terminal import Console, progress

_SPLITS = "val", "test"


def evaluate_uncertainty(config: EvaluateUncertaintyConfig, folder: Path, overrides: list[str]) -> None:
    """Run `qnmixer.evaluate evaluation=uncertainty`. Writes table.md, table.csv and results.json into the folder.

    Raises CheckpointError, ConfigError for a scan without symmetries, or DataError for slices without a split.
    """
    settings, console = config.evaluation, Console()
    cures = Cures(config.passes, config.start)
    module, slices, _ = on_test(config, config.run, overrides, scan=config.geometry, cures=cures)
    if not isinstance(slices, SliceDataModule):
        raise ConfigError("evaluation=uncertainty needs patients of two splits: give data=…, not a datamodule of yours")
    turns = symmetries_of(module.projector, config.symmetries)
    if len(turns) < 2:
        raise ConfigError("evaluation=uncertainty is the deviation over symmetries: give symmetries=8, and a full turn")
    device = choose_device(config.accelerator)
    with recording_scores(module.config, config.logger, device.type, folder, overrides) as (record, loggers):
        module = module.to(device).eval()
        curves = [_curves(module, slices, split, turns, settings.least_hu, console) for split in _SPLITS]
        rows = [_row(level, *curves) for level in settings.levels]
        headings = ["share to cover, %", "factor", "validation patients, %"]
        headings += [f"test patients, {group}, %" for group in GROUPS]
        name, geometry = evaluated_source(slices.config).name, module.projector.geometry
        title = f"deviation over {len(turns)} turns and flips, {geometry.n_views} views, {name}"
        caption = (
            f"Coverage: share of the pixels above {settings.least_hu:g} HU whose error is at most factor × deviation. "
            f"The factor is chosen on {len(curves[0])} validation patients, and the last three columns are the means "
            f"over {len(curves[1])} test patients, ± half of the 95 % interval over patients."
        )
        table = Table(headings, [[in_digits(*cell) for cell in row] for row in rows], title, caption)
        write_text(folder / "table.md", table.markdown() + "\n")
        write_text(folder / "table.csv", table.csv())
        values = {
            f"uncertainty/{row[0][0]:g}/{name_in_logs(heading)}": value
            for row in rows
            for heading, (value, _) in zip(headings[1:], row[1:], strict=True)
        }
        record["evaluated"] = {"weights": digest_of_weights(module.state_dict()), "data": name}
        record["uncertainty"] = values
        for logger in loggers:
            logger.log_metrics(values)
            logger.save()
    console.print(table.terminal())


@torch.no_grad()
def _curves(
    module: Reconstructor, slices: SliceDataModule, split: str, turns: list[Symmetry], least_hu: float, console: Console
) -> np.ndarray:
    """The coverage of each patient of a split, [patients, groups, factors]."""
    n_images = len(slices.dataset(split))
    found: dict[int, np.ndarray] = {}
    loader = slices.loader(split)
    for host_batch in progress(loader, len(loader), f"evaluating {split}", "batch", console):
        batch = slices.transfer_batch_to_device(host_batch, module.device, 0)
        images = images_by_symmetry(module, module.measure(batch, "test"), turns)
        truth, image = to_hu(batch, batch["image"]), to_hu(batch, images.mean(0))
        deviations = images.std(0) * batch["hu_scale"][:, None, None, None]
        for n, x, error, deviation in zip(batch["sample"].tolist(), truth, image - truth, deviations, strict=True):
            body = x > least_hu
            found[n] = coverages(error[body], deviation[body])
    patients = slices.parts[split].patients or range(n_images)
    return by_patient([found[n] for n in range(n_images)], patients)


def _row(level: float, chosen_on: np.ndarray, tested_on: np.ndarray) -> list[tuple[float, float | None]]:
    """A row of the table, in percent: numbers, and half of the 95 % interval of those that are tested."""
    factor = factor_for(level, chosen_on)
    tested = 100 * covered_by(factor, tested_on)
    within = float(100 * covered_by(factor, chosen_on)[:, 0].mean())
    groups = [(mean(group), half_width(group)) for group in tested.T.tolist()]
    return [(100 * level, None), (factor, None), (within, None), *groups]
