"""One run in several processes: the job that the user's process writes down, and what each rank makes of it.

What loads torch is imported where it is needed: a rank can be stopped before.
"""

import json
import os
import signal
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from qnmixer.cli import explain
from qnmixer.config import Config, parse, to_plain
from qnmixer.errors import RankFailed, Stopped
from qnmixer.files import write_text
from qnmixer.processes.ranks import end_with_the_others, is_secondary, leave, loading, rank
from qnmixer.processes.signals import heeding
from qnmixer.tracking.results import amend, read_results
from qnmixer.tracking.resume import how_to_go_on


def fit_in_processes(config: Config, folder: Path, overrides: list[str]) -> float:
    """`fit`, as one rank a device; returns the best monitored value.

    Raises UserError before there is any rank, where data or checkpoints are not there, and RankFailed, naming the rank,
    afterwards. results.json then says failed, whatever the ranks had time to write; or interrupted, after Ctrl-C and
    SIGTERM: nothing was wrong with a run that somebody ended.
    """
    from qnmixer.processes.launch import launch

    n_devices = config.trainer.devices
    assert n_devices is not None
    job = {
        "config": to_plain(config), "folder": str(folder.absolute()), "overrides": overrides, "launcher": os.getpid()
    }  # fmt: skip
    try:
        _try_inputs(config)
        with tempfile.TemporaryDirectory(prefix="qnmixer-job-") as temporary:
            path = Path(temporary) / "job.json"
            path.write_text(json.dumps(job))
            launch(
                ["-m", "qnmixer.training.worker", str(path)],
                n_devices,
                ask_to_stop=lambda: _ask_to_stop(path.parent, n_devices),
            )
    except KeyboardInterrupt as stop:
        amend(folder, overrides, status="interrupted", error=None)
        raise Stopped(getattr(stop, "number", signal.SIGINT), how_to_go_on(folder)) from None
    except BaseException as error:
        amend(folder, overrides, status="failed", error=f"{type(error).__name__}: {error}")
        raise
    best = read_results(folder).get("best")
    if not isinstance(best, dict):
        raise RankFailed(f"all ranks ended well, but rank 0 left no result in {folder}")
    return float(best[config.monitor])


def fit_as_rank(config: Config, folder: Path, overrides: list[str]) -> float:
    """`fit`, by a rank that somebody else started; does not return where that fails, but ends the process."""
    end_with_the_others()
    try:
        return _fit(config, folder, overrides, None)
    except BaseException as error:
        if not is_secondary(error):
            amend(folder, overrides, status="failed", error=f"RankFailed: rank {rank()}: {error}")
        leave(error, explain(error, "train"), say=True)


def main(path: Path) -> None:
    """Be one rank of the job that is written down there."""
    job = json.loads(path.read_text())
    end_with_the_others(job["launcher"])
    try:
        _fit(parse(job["config"]), Path(job["folder"]), job["overrides"], path.parent)
    except BaseException as error:
        leave(error, explain(error, "train"))


def _ask_to_stop(job: Path, n_ranks: int) -> bool:
    """Ask all ranks to stop where they are; False while some are not there yet, and nothing is lost without them."""
    pids = [int(path.read_text()) for path in job.glob("*.pid")]
    if len(pids) < n_ranks:
        return False
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return True


def _fit(config: Config, folder: Path, overrides: list[str], job: Path | None) -> float:
    with loading():
        from qnmixer.training.fit import fit
    _quieten()
    with heeding():
        if job:
            write_text(job / f"{rank()}.pid", str(os.getpid()))
        return fit(config, folder, overrides)


def _quieten() -> None:
    """Leave the terminal to this program."""
    # One that is raised in a finaliser is dropped; that a rank was told to stop is not.
    sys.unraisablehook = lambda it: None if issubclass(it.exc_type, KeyboardInterrupt) else sys.__unraisablehook__(it)
    # A dimension of size 1, as in the weights of convolutions from one channel, has no stride to speak of: the gradient
    # lies in memory as its bucket does, and only torch's comparison of the numbers says otherwise.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    if rank():
        warnings.simplefilter("ignore")  # rank 0 has the same to say


def _try_inputs(config: Config) -> None:
    """Raise UserError here, once, for callbacks, data and checkpoints that every rank would stumble over."""
    from qnmixer.checkpoints.reading import find_checkpoint, read_checkpoint, resumable
    from qnmixer.data.datamodule import SliceDataModule
    from qnmixer.training.callbacks import build_callbacks

    build_callbacks(config.callbacks)
    if config.finetune is not None:
        read_checkpoint(find_checkpoint(config.finetune))
    if config.resume is not None:
        resumable(config, Path(config.resume))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 will say it
        SliceDataModule(config.data).setup("fit")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
