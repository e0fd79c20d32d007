"""The loggers of a run: always metrics.csv, one row for each call that logs; and those that the config names."""

import csv
import io
import os
import platform
import re
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection  # which Lightning brings
from pydantic import ValidationError

from qnmixer.errors import ConfigError, first_line
from qnmixer.files import path_in_errors, write_text
from qnmixer.runs.artifacts import BESIDE_MODEL, MODEL, is_artifact
from qnmixer.runs.layout import checkpoint_in
from qnmixer.runs.processes.process import rank
from qnmixer.runs.public_config import with_names, without_places
from qnmixer.runs.records import (
    as_number,
    damaged,
    git_commit,
    name_of_job,
    read_metrics,
    read_text,
    sweep_of,
    versions,
)
from qnmixer.runs.run import Run, name_of_run
from qnmixer.settings.compose import values_of
from qnmixer.settings.logged_names import OF_NETWORKS
from qnmixer.settings.parts import METRICS_FILE, LoggerConfig, Loggers
from qnmixer.settings.run import Config, effective_batch
from qnmixer.settings.sections import LONGEST_NAME, LONGEST_TAG, WandbConfig

# Exit codes of a W&B run; wandb itself uses the last one for Ctrl-C.
SUCCESS, FAILURE, INTERRUPTION = 0, 1, 255


def build_loggers(config: Config, folder: Path, overrides: list[str], resumed_at: int | None = None) -> list[Logger]:
    """Build the loggers of a run, metrics.csv first; none for fast_dev_run. Only rank 0 builds those of the config.

    W&B starts a new run, or resumes the run of this folder.

    Args:
        config: the run's config, with the number of devices filled in.
        folder: the run folder, which all files go into.
        overrides: of the command line, or of a job in a sweep.
        resumed_at: optimizer steps of the checkpoint, if the run resumes in this folder.

    Raises wandb's error if W&B refuses the API key. If W&B cannot be reached, it warns and continues offline.
    """
    if config.trainer.fast_dev_run:
        return []
    file = MetricsFile(folder, resumed_at)
    loggers: list[Logger] = [file]
    for options in config.logger.values() if rank() == 0 else ():
        if isinstance(options, LoggerConfig):
            if options.target != METRICS_FILE:
                loggers.append(_build_logger(config, options, folder))
        elif _mode(options) != "disabled":
            loggers.append(_wandb_run(config, options, folder, overrides, file))
    return loggers


def _build_logger(config: Config, options: LoggerConfig, folder: Path) -> Logger:
    """Build a logger of Lightning or of the user, and log the config. It gets the run folder if it can take one."""
    places = {
        "save_dir": str(folder),
        "tracking_uri": f"sqlite:///{folder.absolute()}/mlflow.db",  # MLflow's own default is refused by new versions
    }
    arguments = {name: value for name, value in options.plain().items() if value is not None}
    logger: Logger = LoggerConfig(**arguments).at(options.section).build(supplied=places)
    logger.log_hyperparams(_described(config))
    return logger


def close_loggers(exit_code: int) -> None:
    """Finish the W&B run, if this process has one, as SUCCESS, FAILURE or INTERRUPTION."""
    wandb = sys.modules.get("wandb")
    if wandb is None or (run := wandb.run) is None:
        return
    # Without `finish` the next run of this process would log into this one. Without a code it would record success.
    if exit_code == INTERRUPTION:
        run.mark_preempting()  # else W&B calls it failed: this one can resume
    try:
        run.finish(exit_code=exit_code)
    except TimeoutError:
        warnings.warn(
            f"W&B did not get all data, as the network is slow or lost: send it with "
            f"wandb sync --include-online {Path(run.dir).parent}",
            stacklevel=2,
        )


def log_models(config: Config, folder: Path, *names: str) -> None:
    """Log checkpoints of a run as versions of the artifact model-ID of its W&B run, as its `log_model` says.

    Lightning's logger does so for its own ModelCheckpoint only, and not offline. With results.json and metrics.csv a
    run can resume from a version, as `with_artifact` in `reconstruction/weights.py` needs them.

    names: of checkpoints that were written during training. None: those at its end.
    """
    wandb = sys.modules.get("wandb")
    kinds = {options.log_model for options in config.logger.values() if isinstance(options, WandbConfig)}
    if wandb is None or wandb.run is None or kinds.isdisjoint(["all"] if names else ["all", True]):
        return
    for name in names or ("best", "last"):  # W&B calls the newest one latest
        if not (path := checkpoint_in(folder, name)).is_file():
            continue
        with warning_of_wandb(f"{path}, which stays where it is"):
            artifact = wandb.Artifact(f"model-{wandb.run.id}", "model", metadata={"original_filename": path.name})
            for file, place in ((path, MODEL), *((folder / place, place) for place in BESIDE_MODEL)):
                if file.is_file():
                    artifact.add_file(str(file), place, skip_cache=True)
            wandb.run.log_artifact(artifact, aliases=["best"] if name == "best" else ["latest"])


@contextmanager
def warning_of_wandb(what: str) -> Iterator[None]:
    """Warn if W&B does not take something that a run can do without."""
    try:
        yield
    except Exception as error:  # of the network, of the server
        warnings.warn(f"W&B did not take {what} ({type(error).__name__}: {first_line(error)})", stacklevel=2)


@contextmanager
def recording_scores(
    config: Config, chosen: Loggers, accelerator: str, folder: Path, overrides: list[str]
) -> Iterator[tuple[dict[str, Any], list[Logger]]]:
    """Around a command that scores a run: its record, written as results.json, and its loggers, closed at the end.

    `config` is that of the run, with the slices and the noise of the test. Without `chosen` loggers there are none.
    """
    with Run(folder, overrides).recording() as record:
        if not chosen:
            yield record, []
            return
        exit_code = FAILURE
        try:
            trainer = config.trainer.changed(accelerator=accelerator)
            yield record, build_loggers(config.changed(logger=chosen, trainer=trainer), folder, overrides)
            exit_code = SUCCESS
        finally:
            close_loggers(exit_code)


class MetricsFile(CSVLogger):
    """Lightning's logger, but a killed process loses at most the last row, and a resumed run keeps its rows.

    Lightning's own deletes an earlier file, and while it adds a column there is no file.

    `step` of a row is the number of optimizer steps done by then, like `global_step` in a checkpoint.

    Args:
        folder: the run folder.
        resumed_at: optimizer steps of the checkpoint that the run resumes from. Later rows are dropped. None: a new
            run, which replaces the file.
    """

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        super().__init__(folder, name="", version="")
        self.path, self.resumed_at = folder / "metrics.csv", resumed_at
        rows = [] if resumed_at is None else read_metrics(self.path)
        self.last_step = max((int(row["step"]) for row in rows), default=0)  # of the file so far
        self.kept_rows = [row for row in rows if int(row["step"]) <= (resumed_at or 0)]
        self._columns: list[str] | None = None  # of the file; None before the first row

    @property
    def experiment(self) -> Any:
        """This file: Lightning's own writer would delete an earlier one."""
        return self

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Do nothing: .hydra/ has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:  # type: ignore[override]  # floats
        """Append a row."""
        row: dict[str, Any] = {"step": step, **metrics}
        if self._columns is None:
            self._rewrite(self.kept_rows, row)
        elif not row.keys() <= set(self._columns):
            self._rewrite(read_metrics(self.path), row)
        else:
            with path_in_errors(self.path), self.path.open("a", newline="", encoding="utf-8") as stream:
                stream.write(_csv_lines(self._columns, [row]))

    def save(self) -> None:
        """Do nothing: each row is on the disk already."""

    def _rewrite(self, rows: list[dict[str, str]], new_row: dict[str, Any]) -> None:
        # Every row of the file has all its columns, so the first one stands for all.
        columns = dict.fromkeys([*(name for row in [*rows[:1], new_row] for name in row)])
        self._columns = sorted(columns, key=lambda name: name not in ("step", "samples"))
        header = dict(zip(self._columns, self._columns, strict=True))
        write_text(self.path, _csv_lines(self._columns, [header, *rows, new_row]))


def _csv_lines(columns: list[str], rows: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    csv.DictWriter(stream, columns, lineterminator="\n").writerows(rows)
    return stream.getvalue()


# W&B

RUN_ID = Path("wandb", "run_id")
KNOWN_UNTIL = Path("wandb", "known_until")  # W&B has all steps before this one, also those that metrics.csv dropped
_STEP_KEY = "trainer/global_step"  # as Lightning's logger calls it

# Only one kind of network has these. They get a curve, but no column in the table of runs.
_CURVES_ONLY = ("train/lambda_*", *(f"val/{name}" for name in OF_NETWORKS))
_SECONDS_TO_START = 30
_SECONDS_TO_DISK = 0.1  # W&B's default is 15. A kill loses these rows, and the resumed run does not repeat them

# Less than the time that a rank has to stop (processes/process.py). Data that is not sent by then stays here.
_SECONDS_TO_FINISH = 20


class WandbRun(WandbLogger):
    """Lightning's logger, but W&B's own steps are optimizer steps.

    Then all values of one step share a row. A resumed run does not log again what W&B has, but for the last step. So
    `wandb sync` can join the parts.

    Args:
        run: of `wandb.init`.
        next_step: W&B has all steps before this one.
    """

    def __init__(self, run: Any, next_step: int) -> None:
        super().__init__(experiment=run)
        self.next_step = next_step

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add values to the row of a step."""
        assert step is not None
        # The test comes after training, which may have ended at a known step. W&B's steps only rise.
        if step >= self.next_step or any(name.startswith("test/") for name in metrics):
            self.experiment.log({_STEP_KEY: step}, step=max(step, self.next_step))  # files of pictures have its number
            self.experiment.log({**metrics}, step=max(step, self.next_step))


def _mode(options: WandbConfig) -> str:
    """The mode of a W&B run. WANDB_DISABLED switches it off, as W&B once had it and its users still write it."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"
    if options.offline is None or options.mode == "disabled":
        return options.mode
    return "offline" if options.offline else "online"


def _wandb_run(config: Config, options: WandbConfig, folder: Path, overrides: list[str], file: MetricsFile) -> WandbRun:
    """Start the W&B run of a folder. If it resumes, W&B goes on where it was."""
    resumes = file.resumed_at is not None and (folder / RUN_ID).is_file()
    next_step = max(file.last_step, _known_steps(folder / KNOWN_UNTIL)) if resumes else 0
    write_text(folder / KNOWN_UNTIL, str(next_step))  # a run may be killed and resumed several times
    logger = WandbRun(_start_wandb(config, options, folder, overrides, resumes), next_step)
    if config.finetune is not None and is_artifact(config.finetune) and not logger.experiment.offline:
        with warning_of_wandb(f"{config.finetune} as what this run started from"):
            logger.use_artifact(config.finetune, "model")
    for row in file.kept_rows[-1:] if resumes else ():  # a killed W&B lacks it, and training does not repeat it
        values = {
            name: number for name, text in row.items() if name != "step" and (number := as_number(text)) is not None
        }
        logger.log_metrics(values, int(row["step"]))
    return logger


def _known_steps(path: Path) -> int:
    """The number in wandb/known_until; 0 without it. Raises DataError if it is none."""
    text = read_text(path) if path.is_file() else "0"
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise damaged(path, "it is no number of steps", f"remove {path.parent}, and W&B starts a new run")
    return int(text)


def _start_wandb(config: Config, options: WandbConfig, folder: Path, overrides: list[str], resumes: bool) -> Any:
    """Start a W&B run, or resume the one that wandb/run_id names.

    Raises DataError if W&B has no such ids. Raises ConfigError for a variable of the environment that W&B refuses.
    """
    import wandb

    group, name = _group_and_name(config, folder, overrides)
    place, id_file = options.save_dir or options.dir or folder, folder / RUN_ID
    if not resumes:
        # `wandb agent` chooses the id of each run that it starts.
        agent_id = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
        write_text(id_file, agent_id or options.id or options.version or uuid.uuid4().hex[:8])
    if not re.fullmatch(r"[\w.-]{1,128}", run_id := read_text(id_file)):
        raise damaged(id_file, "it is no id of a W&B run", f"remove {id_file.parent}, and W&B starts a new run")
    if options.log_model:  # copies that wait for their upload: in the folder of the run, not in the home
        os.environ.setdefault("WANDB_DATA_DIR", str((Path(place) / "wandb" / "data").absolute()))
    quiet = wandb.Settings(silent=True)  # silent also stops wandb from asking for a key: nobody may sit at the terminal
    try:
        wandb.setup(settings=quiet)
    except ValidationError as error:
        fault = error.errors()[0]
        variable = f"WANDB_{fault['loc'][0]}".upper().replace("WANDB_RUN_TAGS", "WANDB_TAGS")
        raise ConfigError(f"W&B refuses {variable} of the environment: {fault['msg']}") from error
    arguments = options.model_dump(include={"entity", "job_type", "notes", "project", "resume"}) | {
        "mode": _mode(options),
        "id": run_id,
        "group": options.group or (group and group[:LONGEST_NAME]),
        "name": options.name or name[:LONGEST_NAME],
        "tags": _tags(config, overrides, options.tags),
        "config": _described(config),
        "dir": place,
        "settings": wandb.Settings(
            silent=True,
            init_timeout=_SECONDS_TO_START,
            finish_timeout=_SECONDS_TO_FINISH,
            finish_timeout_raises=True,
            x_disable_meta=True,  # it has the command line, paths, the user and the remote of git
            host="",  # the name of this machine is private
            console="off",  # its lines name folders
            x_transaction_log_flush_interval=_SECONDS_TO_DISK,
        ),
    }
    try:
        run = wandb.init(**arguments)
        if _mode(options) == "online":
            print(f"W&B: {run.url}", flush=True)
    except wandb.errors.AuthenticationError:  # a CommError too
        raise
    except wandb.errors.CommError as error:
        wandb.teardown()  # without it wandb would treat the id as in use
        wandb.setup(settings=quiet)
        warnings.warn(
            f"W&B cannot be reached, or refuses the run ({first_line(error)}). The run continues offline: send it "
            f"later with wandb sync {place}/wandb/offline-run-*",
            stacklevel=2,
        )
        run = wandb.init(**(arguments | {"mode": "offline"}))
    for name in _CURVES_ONLY:
        run.define_metric(name, summary="none")
    return run


def _group_and_name(config: Config, folder: Path, overrides: list[str]) -> tuple[str | None, str]:
    """Group and name of a run. In a sweep: the sweep, and the job's own overrides. Else: None, and the setting."""
    run_name = name_of_run(folder)
    if (sweep_entry := sweep_of(folder)) is None:
        views, seed = f"{config.geometry.n_views}views", f"seed{config.seed}"
        return None, "-".join([config.model.name, config.data.name, views, seed, run_name])
    sweep_folder, sweep = sweep_entry
    return sweep_folder.name, without_folders(name_of_job(sweep, overrides)) or run_name


def _tags(config: Config, overrides: list[str], tags: list[str]) -> list[str]:
    """The user's tags, those of the logger, then the experiment, model, data and strategy of the run."""
    values = values_of(overrides).items()
    options = [value for key, value in values if key.partition("/")[0] == "experiment" and value != "null"]
    experiments = [word for words in options for word in re.split(r"[\s,]+", words.strip("[] "))]
    words = [*config.tags, *tags, *experiments, config.model.name, config.data.name, config.strategy.name]
    return [*dict.fromkeys(word[:LONGEST_TAG] for word in words)]


# What loggers may know


def _described(config: Config) -> dict[str, Any]:
    """The config for a logger, without private values, and with the versions and hardware that results depend on."""
    trainer = config.trainer
    # Texts lose their folders: arguments of a user's classes may contain some.
    return apply_to_collection(with_names(without_places(config).plain()), str, without_folders) | {
        "method": config.model.title,
        "git_commit": git_commit(),
        "versions": versions(),
        "device": device_name(trainer.accelerator),
        "n_devices": trainer.n_devices,
        "effective_batch": effective_batch(config),
    }


# A path that starts at a root or a home folder. Its last name is shown, unless that is a user's home.
_PATH_NAME = r"[^\s/\\'\",;:<>]+"
_FOLDERS = re.compile(
    rf"(?<![\w.…<])(?:[A-Za-z]:)?(?:[/\\](?:home|Users)[/\\]{_PATH_NAME}[/\\]?|~[\w.-]*[/\\]|[/\\]{_PATH_NAME}[/\\]|[A-Za-z]:\\)"
    rf"(?:{_PATH_NAME}[/\\])*"
)


def without_folders(text: str) -> str:
    """Replace the folders of absolute paths in a text by …, so that it names neither the machine nor the user."""
    return _FOLDERS.sub("…/", text)


def device_name(accelerator: str) -> str:
    """The name of the GPU or CPU that computes."""
    if accelerator == "cuda":
        return torch.cuda.get_device_name()
    path = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", path.read_text(encoding="utf-8")) if path.is_file() else None
    return match.group(1) if match else platform.processor() or platform.machine()
