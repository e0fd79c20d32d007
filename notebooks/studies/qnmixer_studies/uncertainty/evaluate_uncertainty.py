"""The command `qnmixer.evaluate evaluation=uncertainty`: a table of coverage on validation and on test patients."""

from pathlib import Path
from statistics import mean

import torch

from qnmixer.data.batch import to_hu
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError
from qnmixer.evaluation.evaluate import evaluated_source
from qnmixer.evaluation.evaluate_run import on_test
from qnmixer.evaluation.logs import name_in_logs
from qnmixer.evaluation.statistics import half_width
from qnmixer.files import write_text
from qnmixer.parallel.devices import choose_device
from qnmixer.physics import Symmetry, images_by_symmetry
from qnmixer.reconstruction.pretrained import digest_of_weights
from qnmixer.reconstruction.reconstructor import Reconstructor, symmetries_of
from qnmixer.reconstruction.uncertainty import Calibration, groups_of, smooth_deviation
from qnmixer.runs.loggers import recording_scores
from qnmixer.runs.tables import Table, in_digits
from qnmixer.runs.terminal import Console, progress
from qnmixer_studies.uncertainty.coverage import Pixels, by_patient, coverage, factors_for, half_widths_of_factors
from qnmixer_studies.uncertainty.uncertainty_config import EvaluateUncertaintyConfig

_SPLITS = "val", "test"


def evaluate_uncertainty(config: EvaluateUncertaintyConfig, folder: Path, overrides: list[str]) -> None:
    """Run `qnmixer.evaluate evaluation=uncertainty`. Writes a table, results.json, and the calibration for reconstruct.

    Raises CheckpointError, ConfigError for a scan without symmetries, or DataError for slices without a split.
    """
    settings, console = config.evaluation, Console()
    module, slices, _ = on_test(config, config.run, overrides)
    if not isinstance(slices, SliceDataModule):
        raise ConfigError("evaluation=uncertainty needs patients of two splits: give data=…, not a datamodule of yours")
    turns = symmetries_of(module.projector, config.symmetries)
    if len(turns) < 2:
        raise ConfigError("evaluation=uncertainty is the deviation over symmetries: give symmetries=8, and a full turn")
    device = choose_device(config.accelerator)
    with recording_scores(module.config, config.logger, device.type, folder, overrides) as (record, loggers):
        module = module.to(device).eval()
        chosen_on, tested_on = (_pixels(module, slices, part, turns, settings.least_hu, console) for part in _SPLITS)
        factors = {f"{100 * level:g}": factors_for(level, chosen_on) for level in settings.levels}
        digest, name = digest_of_weights(module.state_dict()), evaluated_source(slices.config).name
        scan, noise = module.config.geometry.plain(), module.config.noise.plain()
        calibration = Calibration(factors, settings.least_hu, len(turns), len(chosen_on), digest, scan, noise)
        calibration.save(folder / "uncertainty.json")
        table, values = _table(factors, chosen_on, tested_on)
        turned = f"deviation over {len(turns)} turns and flips"
        table.title = f"{turned}, {scan['n_views']} views, noise {module.config.noise.name}, {name}"
        write_text(folder / "table.md", table.markdown() + "\n")
        write_text(folder / "table.csv", table.csv())
        record["evaluated"] = {"weights": digest, "data": name}
        record["uncertainty"] = values
        for logger in loggers:
            logger.log_metrics(values)
            logger.save()
    console.print(table.terminal())


@torch.no_grad()
def _pixels(
    module: Reconstructor, slices: SliceDataModule, part: str, turns: list[Symmetry], least_hu: float, console: Console
) -> list[Pixels]:
    """The pixels of each patient of a part that are not air in the reconstruction."""
    n_images = len(slices.dataset(part))
    pixels: dict[int, Pixels] = {}
    loader = slices.loader(part)
    for host_batch in progress(loader, len(loader), f"evaluating {part}", "batch", console):
        batch = slices.transfer_batch_to_device(host_batch, module.device, 0)
        images = images_by_symmetry(module, module.measure(batch, "test"), turns)
        truth, image = (to_hu(batch, x).cpu() for x in (batch["image"], images.mean(0)))
        smooth = smooth_deviation(images.std(0) * batch["hu_scale"][:, None, None, None]).cpu()
        for n, x, hu, deviation in zip(batch["sample"].tolist(), truth[:, 0], image[:, 0], smooth[:, 0], strict=True):
            body = hu > least_hu
            groups = groups_of(deviation, body)
            ratio = (hu - x).abs() / deviation
            pixels[n] = Pixels(*(values[body].numpy() for values in (ratio, groups, x)))
    return by_patient([pixels[n] for n in range(n_images)], slices.parts[part].patients or [None] * n_images)


def _table(
    factors: dict[str, list[float]], chosen_on: list[Pixels], tested_on: list[Pixels]
) -> tuple[Table, dict[str, float]]:
    """The coverage in each tenth and tissue: a table, and its numbers for loggers."""
    headings, values = ["pixels"], dict[str, float]()
    rows: dict[str, list[str]] = {}
    for share, of_groups in factors.items():
        headings += [f"{share} %: factor", f"validation, {share} %", f"test, {share} %"]
        intervals = half_widths_of_factors(float(share) / 100, chosen_on)
        chosen, tested = coverage(of_groups, chosen_on), coverage(of_groups, tested_on)
        for heading, shares in tested.items():
            group = int(heading.removeprefix("tenth ")) - 1 if heading.startswith("tenth") else None
            factor = "" if group is None else in_digits(of_groups[group], intervals[group])
            of_chosen, of_tested = ([100 * value for value in part] for part in (chosen[heading], shares))
            cell = in_digits(mean(of_chosen)) if of_chosen else "–"
            rows.setdefault(heading, [heading]).extend([factor, cell])
            rows[heading].append(in_digits(mean(of_tested), half_width(of_tested)) if of_tested else "–")
            if of_tested:
                values[f"uncertainty/{share}/{name_in_logs(heading)}"] = mean(of_tested)
    note = (
        "Covered: pixels whose error is at most factor × smooth deviation, √(blur(deviation², 4 pixels) + (2 HU)²). "
        "Tenth 1 has the smallest deviations of a slice. Each tenth has its factor, chosen on validation patients: "
        f"{len(chosen_on)}, ± half of its 95 % jackknife interval over them. Test: the mean over {len(tested_on)} "
        "patients, ± half of the 95 % interval for other patients. Air, by the reconstruction, is left out."
    )
    return Table(headings, [*rows.values()], note=note), values
