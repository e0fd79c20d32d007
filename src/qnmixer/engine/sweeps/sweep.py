"""A sweep (`qnmixer.train -m …`): its folder, the keys that vary, and its final report. No torch import.

The folder records everything. results.json of each job says how that job ended, with every launcher and on every
machine. If the same sweep starts again, it finds there which jobs are done.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.compose import quoted
from qnmixer.engine.config.sections import modes_of, parse_metrics
from qnmixer.engine.sweeps.report import rows_of, write_report
from qnmixer.engine.tracking.results import git_commit, read_results
from qnmixer.engine.tracking.run import RUNS, run_lock
from qnmixer.engine.tracking.sweep_file import SWEEP, Sweep, read_sweep, write_sweep
from qnmixer.errors import ConfigError, SweepFailed
from qnmixer.files import check_unused, last_change

FOLDER = "hydra.sweep.dir"


@contextmanager
def sweep(overrides: list[str], config: DictConfig) -> Iterator[str]:
    """Prepare a sweep before its jobs run, and report after them: sweep.json, then table, picture and failed jobs.

    Args:
        overrides: of the command line.
        config: the config from the overrides that do not vary, with Hydra's own part.

    Yields the override that makes Hydra use the folder. At the end it raises SweepFailed, which names each failed job.
    Raises ConfigError if a search would optimise in the wrong direction.
    """
    varying = _varying(overrides, config)
    _check(overrides, config)
    given = any(override.startswith(f"{FOLDER}=") for override in overrides)
    folder = Path(config.hydra.sweep.dir) if given else Path("runs") / "sweeps" / _name(overrides, varying)
    described: Sweep = {"overrides": overrides, "varying": varying, "git_commit": git_commit(), "jobs": None}
    with run_lock(folder):
        # Results of something else would be counted as jobs of this sweep.
        if not (folder / SWEEP).is_file():
            check_unused(FOLDER, folder)
        write_sweep(folder, described)
        print(f"sweep in {folder}", flush=True)
        error: Exception | None = None
        try:
            yield f"{FOLDER}={quoted(folder.absolute())}"  # absolute: a job may start in another working directory
        except Exception as raised:  # for example, optuna raises if no job has a result
            error = raised
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; the same command runs the jobs that are not done") from None
        finally:  # also after Ctrl-C: the table shows what is done so far
            rows = rows_of(folder, read_sweep(folder)["jobs"], varying)
            write_report(folder, rows)
        failed = [row.name for row in rows if row.status != "done"]
        if error is None and not rows:
            raise SweepFailed(f"no job has written anything into {folder}: can all machines see this folder?")
        if failed:
            raise SweepFailed(
                f"{len(failed)} of {len(rows)} jobs failed: {', '.join(failed)} (see {folder}/sweep.md). Fix the "
                "cause, then run the same command again: it runs only the jobs that are not done"
            ) from error
        if error is not None:
            raise error


def place_jobs(folder: Path, jobs: list[tuple[list[str], str]]) -> list[Path]:
    """Choose the folder of each job, and record it in sweep.json.

    A job gets the folder in which a job with the same overrides ran before. Else it gets the folder that Hydra chose,
    or, if that is taken, the next free number: a search that repeats failed jobs then draws other jobs than before.

    Args:
        folder: of the sweep.
        jobs: for each job its overrides and the folder name that Hydra chose.
    """
    described = read_sweep(folder)
    placed = {folder / name: overrides for name, overrides in (described["jobs"] or {}).items()}
    ran = {path.parent: read_results(path.parent).get("overrides") for path in sorted(folder.glob("**/results.json"))}
    places: list[Path] = []
    for overrides, name in jobs:
        wanted = (folder / name, *(folder / str(n) for n in range(len(ran) + len(placed) + 1)))
        same = [path for path in (wanted[0], *ran) if ran.get(path) == overrides and path not in placed]
        place = same[0] if same else next(path for path in wanted if path not in ran and path not in placed)
        placed[place] = overrides
        places.append(place)
    write_sweep(folder, described | {"jobs": {str(path.relative_to(folder)): its for path, its in placed.items()}})
    return places


def _check(overrides: list[str], config: DictConfig) -> None:
    if any(override.startswith("resume=") for override in overrides):
        raise ConfigError("resume= resumes one run, not a sweep: to resume a sweep, give its own command again")
    sweeper = config.hydra.sweeper
    modes = modes_of(parse_metrics(OmegaConf.to_container(config.metrics)))
    wanted = f"{modes.get(config.monitor, 'max')}imize"
    if "direction" in sweeper and getattr(sweeper.direction, "name", sweeper.direction) != wanted:
        raise ConfigError(f"monitor={config.monitor} must be {wanted}d: set hydra.sweeper.direction={wanted}")


def _varying(overrides: list[str], config: DictConfig) -> list[str]:
    vary = {str(key): True for key in OmegaConf.select(config, "hydra.sweeper.params") or {}}
    for override in OverridesParser.create().parse_overrides(overrides):
        vary[override.get_key_element().lstrip("+")] = override.is_sweep_override()  # the last one counts, as in Hydra
    return [key for key, varies in vary.items() if varies]


def _name(overrides: list[str], varying: list[str]) -> str:
    """Name of the sweep's folder: the same for the same sweep on any machine, and for a search with more trials."""
    # These do not change the results of a job.
    no_matter = ("hydra.launcher", "hydra/launcher", "hydra.sweeper.n_trials")
    what = [override for override in overrides if not override.startswith(no_matter)]
    mark = hashlib.sha256("\n".join(what).encode()).hexdigest()[:6]
    return "-".join([*(key.replace("/", ".").rpartition(".")[2] for key in varying), mark])


def find_sweep(text: str) -> Path:
    """The folder of a sweep. "latest": the sweep under runs/ whose job ended last. Raises ConfigError without one."""
    if text == "latest":
        found = [path.parent for path in RUNS.glob(f"**/{SWEEP}")]
        if not found:
            raise ConfigError(
                f"sweep=latest finds no sweep under {RUNS.absolute()}: give its folder, sweep=DIR, or run one with "
                "python -m qnmixer.train -m experiment=compare_small"
            )
        return max(found, key=lambda sweep: last_change(sweep / SWEEP, *sweep.glob("*/results.json")))
    folder = Path(text).expanduser()
    if not (folder / SWEEP).is_file():
        what = "is no sweep (it has no sweep.json)" if folder.exists() else "does not exist"
        raise ConfigError(f"sweep={text} {what}: give the folder that qnmixer.train -m printed")
    return folder
