"""What `logger=wandb` gets of an evaluation, read back from W&B's own file; of one by task: extras/task."""

import json
from pathlib import Path

import pytest

from qnmixer.evaluate import check, evaluate

from ..conftest import offline_runs
from ..saved import TINY, run, save


@pytest.mark.usefixtures("no_wandb")
def test_wandb_gets_the_scores_the_table_the_picture_and_the_page(tmp_path: Path) -> None:
    trained, folder = save(tmp_path / "run", *TINY, "data.n_test=2", "data.num_workers=0"), tmp_path / "scores"
    words = (f"run={trained}", "accelerator=cpu", f"hydra.run.dir={folder}", "logger=wandb")
    code, _, stderr = run(evaluate, check, "evaluate", *words)
    assert (code, stderr) == (0, "")
    (logged,) = offline_runs(folder)
    record = json.loads((folder / "results.json").read_text())
    assert logged.exit_code == 0
    assert logged.config["method"] == "QN-Mixer"
    for metric, value in record["test"]["QN-Mixer"].items():
        assert logged.summary[f"test/{metric}"] == value
        assert logged.summary[f"test/fbp/{metric}"] == record["test"]["FBP"][metric]
    files = logged.folder / "files"
    assert {path.name for path in (files / folder.name).iterdir()} == {"picture.png", "page.html"}
    assert (
        len([*(files / "media" / "table").rglob("*.json")]) == len([*(files / "media" / "images").rglob("*.png")]) == 1
    )
    for path in [*logged.folder.glob("*.wandb"), *files.rglob("*")]:
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes()
