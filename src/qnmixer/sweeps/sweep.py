"""A sweep (`qnmixer.train -m …`): where it lives, what varies in it, and what is said when it ends. No torch import.

Its folder is the truth: results.json of each job says how that job ended, whichever launcher brought it wherever, and
the same sweep, started again, finds there which jobs are done.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from qnmixer.config.overrides import quoted
from qnmixer.errors import ConfigError, SweepFailed
from qnmixer.files import check_unused, last_change
from qnmixer.sweeps.report import rows_of, write_report
from qnmixer.tracking.results import git_commit, read_results
from qnmixer.tracking.run_folder import RUNS, run_lock
from qnmixer.tracking.sweep_file import SWEEP, Sweep, read_sweep, write_sweep

FOLDER = "hydra.sweep.dir"


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
    _check(overrides, config)
    given = any(override.startswith(f"{FOLDER}=") for override in overrides)
    folder = Path(config.hydra.sweep.dir) if given else Path("runs") / "sweeps" / _name(overrides, varying)
    described: Sweep = {"overrides": overrides, "varying": varying, "git_commit": git_commit(), "jobs": None}
    with run_lock(folder):
        if not (folder / SWEEP).is_file():
            check_unused(FOLDER, folder)
        write_sweep(folder, described)
        print(f"sweep in {folder}", flush=True)
        error: Exception | None = None
        try:
            yield f"{FOLDER}={quoted(folder.absolute())}"  # a job may begin elsewhere
        except Exception as raised:  # as a search without any result does
            error = raised
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; the same command goes on with what is not done") from None
        finally:
            rows = rows_of(folder, read_sweep(folder)["jobs"], varying)
            write_report(folder, rows)
        failed = [row.name for row in rows if row.status != "done"]
        if error is None and not rows:
            raise SweepFailed(f"no job has left anything in {folder}: is it there for whoever ran them?")
        if failed:
            raise SweepFailed(
                f"{len(failed)} of {len(rows)} jobs did not end well: {', '.join(failed)} (see {folder}/sweep.md); "
                "once that is mended, the same command goes on with them"
            ) from error
        if error is not None:
            raise error


def place_jobs(folder: Path, jobs: list[tuple[list[str], str]]) -> list[Path]:
    """Where jobs are to run: where one with the same overrides has before, else as asked for or, if taken, numbered on.

    A search that was mended draws other jobs than before from there on. Told to sweep.json.

    Args:
        folder: the sweep's.
        jobs: overrides of each, and the name that its folder is to have.
    """
    described = read_sweep(folder)
    taken = {path.parent: read_results(path.parent).get("overrides") for path in sorted(folder.glob("**/results.json"))}
    before = described["jobs"] or {}
    placed = {folder / name for name in before}
    free = {path: overrides for path, overrides in taken.items() if path not in placed}
    places: dict[Path, list[str]] = {}
    for overrides, name in jobs:
        place = folder / name
        if free.get(place) != overrides:
            if same := next((path for path, its in free.items() if its == overrides), None):
                place = same
            elif place in taken or place in placed:
                place = next(p for n in count() if (p := folder / str(n)) not in taken and p not in placed)
        free.pop(place, None)
        placed.add(place)
        places[place] = overrides
    now = {str(place.relative_to(folder)): overrides for place, overrides in places.items()}
    write_sweep(folder, described | {"jobs": before | now})
    return [*places]


def _check(overrides: list[str], config: DictConfig) -> None:
    if any(override.startswith("resume=") for override in overrides):
        raise ConfigError("resume= goes on with one run; a sweep goes on when its own command is given again")
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
    """Of the folder: the same for the same sweep, wherever its jobs run, and for a search that is to be longer."""
    no_matter = ("hydra.launcher", "hydra/launcher", "hydra.sweeper.n_trials")
    what = [override for override in overrides if not override.startswith(no_matter)]
    digest = hashlib.sha256("\n".join(what).encode()).hexdigest()
    return "-".join([*(key.replace("/", ".").rpartition(".")[2] for key in varying), digest[:6]])


def find_sweep(text: str) -> Path:
    """The folder of a sweep; "latest": the one under runs/ in which a job last ended. Raises ConfigError."""
    if text == "latest":
        found = [path.parent for path in RUNS.glob(f"**/{SWEEP}")]
        if not found:
            raise ConfigError(
                f"sweep=latest: there is no sweep under {RUNS.absolute()}: give its folder, sweep=DIR, or make one: "
                "python -m qnmixer.train -m experiment=compare_small"
            )
        return max(found, key=lambda sweep: last_change(sweep / SWEEP, *sweep.glob("*/results.json")))
    folder = Path(text).expanduser()
    if not (folder / SWEEP).is_file():
        what = "is no sweep (it has no sweep.json)" if folder.exists() else "does not exist"
        raise ConfigError(f"sweep={text} {what}: give the folder that qnmixer.train -m printed")
    return folder
