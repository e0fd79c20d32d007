"""What loggers get of an evaluation: numbers; and W&B also a picture and files."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from qnmixer.evaluation.evaluate import PAGE, PICTURE
from qnmixer.evaluation.scores import Evaluation
from qnmixer.settings import logged_names


def name_in_logs(heading: str) -> str:
    """A heading as a name that every logger takes: MLflow refuses commas, brackets and percent signs."""
    return re.sub(r"[^\w.-]+", "_", heading).strip("_")


def log_scores(
    loggers: Sequence[Logger],
    values: Mapping[str, float],
    picture: tuple[str, Path],
    files: Sequence[Path],
    base: Path,
    step: int = 0,
) -> None:
    """Log numbers, and in W&B a picture and files, in the row of a step.

    `picture`: its name and its file. Files that do not exist are left out. W&B keeps their places below the folder
    `base`. A command that does not train has step 0.
    """
    for logger in loggers:
        logger.log_metrics(dict(values), step)
        if isinstance(logger, WandbLogger):
            logger.log_image(picture[0], [str(picture[1])], step)
            for path in filter(Path.exists, files):
                logger.experiment.save(str(path), base_path=str(base), policy="now")
        logger.save()  # Lightning will not call them again, and some loggers write at intervals only


def log_evaluation(
    loggers: Sequence[Logger], evaluation: Evaluation, folder: Path, split: str, step: int = 0, **counts: float
) -> None:
    """Log the means of an evaluation as SPLIT/NAME. W&B also gets the table, picture and page from its folder.

    counts: more numbers for the same row.
    """
    means = counts | {f"{split}/{name}": value for name, value in evaluation.metrics().items()}
    files = [folder / PICTURE, folder / PAGE]
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            _log_table(logger, evaluation, f"{split}/{logged_names.TABLE}", step)
    log_scores(loggers, means, (f"{split}/{logged_names.PICTURE}", files[0]), files, folder.parent, step)


def _log_table(logger: WandbLogger, evaluation: Evaluation, name: str, step: int) -> None:
    """Log the table as a file of this run only. W&B's own way also makes an artifact, which names the home folder."""
    import wandb

    numbers = evaluation.numbers()
    table = wandb.Table(columns=[*numbers.headings], data=[*numbers.rows])
    table.bind_to_run(logger.experiment, name, step)
    values: dict[str, Any] = {name: table}
    logger.log_metrics(values, step)
