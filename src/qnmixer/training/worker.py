"""One run in several processes: the job that the user's process writes down, and what each rank makes of it.

What loads torch is imported where it is needed: a rank can be stopped before.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

from qnmixer.cli import explain
from qnmixer.config import Config, parse, to_plain
from qnmixer.errors import RankFailed
from qnmixer.ranks import end_with_the_others, is_secondary, leave, loading, rank
from qnmixer.tracking.results import amend, read_results


def fit_in_processes(config: Config, folder: Path, overrides: list[str]) -> float:
    """`fit`, as one rank a device; returns the best monitored value.

    Raises UserError before there is any rank, where data or checkpoints are not there, and RankFailed, naming the rank,
    afterwards. results.json then says failed, whatever the ranks had time to write; or interrupted, after Ctrl-C and
    SIGTERM: nothing was wrong with a run that somebody ended.
    """
    from qnmixer.parallel.launch import launch

    n_devices = config.trainer.devices
    assert n_devices is not None
    n_threads = max(1, (os.cpu_count() or 1) // n_devices - config.data.num_workers)
    job = {
        "config": to_plain(config), "folder": str(folder.absolute()), "overrides": overrides, "launcher": os.getpid()
    }  # fmt: skip
    try:
        _try_inputs(config)
        with tempfile.TemporaryDirectory(prefix="qnmixer-job-") as temporary:
            path = Path(temporary) / "job.json"
            path.write_text(json.dumps(job))
            launch(["-m", "qnmixer.training.worker", str(path)], n_devices, n_threads)
    except (KeyboardInterrupt, SystemExit):
        amend(folder, overrides, status="interrupted", error=None)
        raise
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
        return _fit(config, folder, overrides)
    except BaseException as error:
        if not is_secondary(error):
            amend(folder, overrides, status="failed", error=f"RankFailed: rank {rank()}: {error}")
        leave(error, explain(error, "train"), say=True)


def main(path: Path) -> None:
    """Be one rank of the job that is written down there."""
    job = json.loads(path.read_text())
    end_with_the_others(job["launcher"])
    try:
        _fit(parse(job["config"]), Path(job["folder"]), job["overrides"])
    except BaseException as error:
        leave(error, explain(error, "train"))


def _fit(config: Config, folder: Path, overrides: list[str]) -> float:
    with loading():
        from qnmixer.training.fit import fit
    _quieten()
    return fit(config, folder, overrides)


def _quieten() -> None:
    """Leave the terminal, and what signals do, to this program."""
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    # Lightning's own handler of SIGTERM is a broadcast, which waits for ranks that have gone; that of SIGUSR1 has SLURM
    # start the job again, with a checkpoint that only Lightning knows of.
    _SignalConnector.register_signal_handlers = lambda self: None  # type: ignore[method-assign]  # off
    # PromptInterrupt sees to what is raised in a finaliser.
    sys.unraisablehook = lambda it: None if it.exc_type is KeyboardInterrupt else sys.__unraisablehook__(it)
    # A dimension of size 1, as in the weights of convolutions from one channel, has no stride to speak of: the gradient
    # lies in memory as its bucket does, and only torch's comparison of the numbers says otherwise.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    if rank():
        warnings.simplefilter("ignore")  # rank 0 has the same to say


def _try_inputs(config: Config) -> None:
    """Raise UserError here, once, for data and checkpoints that every rank would stumble over."""
    from qnmixer.data.datamodule import SliceDataModule
    from qnmixer.training.checkpoints import find_checkpoint, read_checkpoint, resumable

    if config.finetune is not None:
        read_checkpoint(find_checkpoint(Path(config.finetune)))
    if config.resume is not None:
        resumable(config, Path(config.resume))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 will say it
        SliceDataModule(config.data).setup("fit")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
