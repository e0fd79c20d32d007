"""One run in several processes: the job that the user's process writes down, and what each rank makes of it."""

import json
import sys
import tempfile
import traceback
from pathlib import Path

from qnmixer.cli import explain
from qnmixer.config import Config, parse, to_plain
from qnmixer.errors import RankFailed
from qnmixer.parallel.launch import die_with_parent, launch, leave
from qnmixer.tracking.results import amend, read_results
from qnmixer.training.fit import fit


def fit_in_processes(config: Config, folder: Path, overrides: list[str]) -> float:
    """`fit`, as one rank a device; returns the best monitored value.

    Raises RankFailed, naming the rank; results.json then says failed, whatever the ranks had time to write.
    """
    assert config.trainer.devices is not None
    job = {"config": to_plain(config), "folder": str(folder.absolute()), "overrides": overrides}
    with tempfile.TemporaryDirectory(prefix="qnmixer-job-") as temporary:
        path = Path(temporary) / "job.json"
        path.write_text(json.dumps(job))
        try:
            launch(["-m", "qnmixer.training.worker", str(path)], config.trainer.devices)
        except KeyboardInterrupt:
            amend(folder, status="interrupted")
            raise
        except BaseException as error:
            amend(folder, status="failed", error=f"{type(error).__name__}: {error}")
            raise
    best = read_results(folder).get("best")
    if not isinstance(best, dict):
        raise RankFailed(f"all ranks ended well, but rank 0 left no result in {folder}")
    return float(best[config.monitor])


def main(path: Path) -> None:
    """Be one rank of the job that is written down there."""
    die_with_parent()
    job = json.loads(path.read_text())
    try:
        fit(parse(job["config"]), Path(job["folder"]), job["overrides"])
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        leave(error, explain(error, "train") or traceback.format_exc())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
