"""A sweep (`qnmixer.train -m …`): where it lives, what varies in it, and what is said when it ends. No torch import.

Its folder is the truth: results.json of each job says how that job ended, whichever launcher brought it wherever, and
the same sweep, started again, finds there which jobs are done.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from qnmixer.errors import ConfigError, SweepFailed
from qnmixer.files import write_text
from qnmixer.tracking.results import git_commit
from qnmixer.tracking.runs import SWEEP, held
from qnmixer.tracking.sweep_report import readable, rows_of, write_report

FOLDER = "hydra.sweep.dir"


class Sweep(TypedDict):
    """What a sweep's folder says of it in sweep.json, from before its first job on."""

    overrides: list[str]  # as they were given
    varying: list[str]  # keys of which not all jobs have the same value
    git_commit: str | None


@contextmanager
def sweep(overrides: list[str], config: DictConfig) -> Iterator[str]:
    """What surrounds a sweep: its folder and sweep.json before, the table, the picture and who failed after.

    Args:
        overrides: those of the command line.
        config: what they make without those that vary, Hydra's own part included.

    Yields the override that has Hydra use the folder. Raises SweepFailed at the end, naming each job that failed;
    ConfigError where a search would go the wrong way.
    """
    varying = _varying(overrides, config)
    check_direction(config)
    folder = next((Path(o.partition("=")[2]) for o in overrides if o.startswith(f"{FOLDER}=")), None)
    folder = folder or Path("runs") / "sweeps" / _name(overrides, varying)
    described: Sweep = {"overrides": overrides, "varying": varying, "git_commit": git_commit()}
    with held(folder):
        write_text(folder / SWEEP, json.dumps(described, indent=2) + "\n")
        error: Exception | None = None
        try:
            yield f"{FOLDER}={folder}"
        except Exception as raised:  # as a search without any result does
            error = raised
        finally:
            rows = rows_of(folder, varying)
            write_report(folder, rows)
        if failed := [row.name for row in rows if row.status != "done"]:
            raise SweepFailed(
                f"{len(failed)} of {len(rows)} jobs did not end well: {', '.join(failed)} (see {folder}/sweep.md); "
                "once that is mended, the same command goes on with them"
            ) from error
        if error is not None:
            raise error


def sweep_of(folder: Path) -> tuple[Path, Sweep] | None:
    """The sweep that a run folder is in, and its folder; None where the run is one by itself."""
    for parent in folder.absolute().parents:
        if (parent / SWEEP).is_file():
            return parent, json.loads((parent / SWEEP).read_text())
    return None


def name_of_job(sweep: Sweep, overrides: list[str]) -> str:
    """The overrides by which a job differs from the others, as "optimizer.lr=0.001, strategy=ddp"."""
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    return ", ".join(f"{key}={readable(value)}" for key, _, value in pairs if key in sweep["varying"])


def check_direction(config: DictConfig) -> None:
    """Raise ConfigError where a search would look for the worst."""
    sweeper = config.hydra.sweeper
    wanted = "minimize" if config.monitor == "val/loss" else "maximize"
    if "direction" in sweeper and getattr(sweeper.direction, "name", sweeper.direction) != wanted:
        raise ConfigError(f"monitor={config.monitor} is to be {wanted}d: set hydra.sweeper.direction={wanted}")


def _varying(overrides: list[str], config: DictConfig) -> list[str]:
    vary = {str(key): True for key in OmegaConf.select(config, "hydra.sweeper.params") or {}}
    for override in OverridesParser.create().parse_overrides(overrides):
        vary[override.get_key_element().lstrip("+")] = override.is_sweep_override()  # the last one counts, as in Hydra
    return [key for key, varies in vary.items() if varies]


def _name(overrides: list[str], varying: list[str]) -> str:
    """Of the folder: the same for the same sweep, however many jobs of it may run at once and wherever."""
    what = [o for o in overrides if not o.startswith(("hydra.launcher", "hydra/launcher"))]
    digest = hashlib.sha256("\n".join(what).encode()).hexdigest()
    return "-".join([*(key.replace("/", ".").rpartition(".")[2] for key in varying), digest[:6]])
