import contextlib
import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from qnmixer.errors import ConfigError
from qnmixer.files import check_unused
from qnmixer.runs.records import read_results as read
from qnmixer.runs.records import signed
from qnmixer.runs.run import Run, run_lock

from ..conftest import lock_of_another


def test_a_run_is_recorded_while_it_goes_and_resumed_with_what_it_knew(tmp_path: Path) -> None:
    run = Run(tmp_path, ["seed=1"])
    with run.lock():
        assert (read(tmp_path)["status"], read(tmp_path)["overrides"]) == ("running", ["seed=1"])  # it may be killed
    with contextlib.suppress(KeyboardInterrupt), run.recording():
        run.record["device"] = "a GPU"
        assert read(tmp_path)["status"] == "running"
        raise KeyboardInterrupt
    assert read(tmp_path)["status"] == "interrupted"

    again = Run(tmp_path, ["seed=1", f"resume={tmp_path}"], str(tmp_path))
    with again.recording():
        again.record_resume(5)
        assert read(tmp_path)["resumed"][0]["step"] == 5
    assert again.resumed_at == 5
    record = read(tmp_path)
    assert (record["status"], record["overrides"], record["device"]) == ("done", ["seed=1"], "a GPU")


def test_an_end_that_nobody_recorded(tmp_path: Path) -> None:
    Run(tmp_path, ["seed=1"]).record_end("failed", ValueError("no data"))
    record = read(tmp_path)
    assert record.pop("started")
    assert record == {**signed(["seed=1"]), "status": "failed", "error": "ValueError: no data"}
    with contextlib.suppress(SyntaxError), Run(tmp_path / "b", ["seed=1"]).lock():  # before the record begins
        raise SyntaxError("of fit.py")
    record = read(tmp_path / "b")
    assert (record["status"], record["error"]) == ("failed", "SyntaxError: of fit.py")


def test_where_a_strangers_run_began_is_not_signed(tmp_path: Path) -> None:
    """Without its checkpoints it would begin there again, on the user's own word."""
    overrides = ["finetune=hf://evil/net", "seed=1"]
    (tmp_path / "results.json").write_text(json.dumps({"status": "interrupted", "overrides": overrides}))
    run = Run(tmp_path, ["seed=1", f"resume={tmp_path}"], str(tmp_path))
    with run.recording():
        run.record_resume(3)
    assert read(tmp_path)["overrides"] == ["seed=1"]


def test_one_process_holds_the_lock_and_a_killed_one_releases_it(tmp_path: Path) -> None:
    """Also where a child outlives it. Who holds it removes what was half written."""
    left, others = (tmp_path / "checkpoints" / f".{name}.tmp" for name in (f"last.ckpt.{'0a' * 16}", "of_another"))
    left.parent.mkdir()
    left.touch()
    others.touch()
    with lock_of_another(tmp_path) as holder:
        with pytest.raises(ConfigError, match=f"process {holder} on .* writes to {tmp_path}"), Run(tmp_path).lock():
            pass
        assert left.exists()  # it may be another machine's
        os.kill(holder, 9)
        os.waitpid(holder, 0)
        with Run(tmp_path).lock():
            assert not left.exists()
            assert others.exists()
            assert (tmp_path / ".lock").read_text().startswith("process ")


@pytest.mark.parametrize(
    "name", [".lock", "checkpoints", ".hydra.next", ".hydra/config.yaml", "evaluation", "0/output.log"]
)
def test_what_a_link_leads_to_stays_as_it_is(tmp_path: Path, name: str) -> None:
    """Also where the folder that it leads to is not there yet."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    (folder / name).parent.mkdir(parents=True)
    for target in (elsewhere / "mine", elsewhere, elsewhere / "new"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        for begin in (run_lock, partial(check_unused, "output")):
            line = f"^{folder / name} is a link to .*: give another folder$"  # no advice to remove it
            with pytest.raises(ConfigError, match=line), ExitStack() as stack:
                stack.enter_context(begin(folder))
        assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"mine": "mine"}


def test_links_of_wandb_are_fine_and_a_lock_is_a_file(tmp_path: Path) -> None:
    part = tmp_path / "wandb" / "offline-run-1"
    part.mkdir(parents=True)
    (part / "debug.log").symlink_to(Path(__file__))
    (tmp_path / "wandb" / "latest-run").symlink_to(part.name)
    with run_lock(tmp_path):
        pass
    with pytest.raises(ConfigError, match="is a link to another place"), run_lock(part.parent):
        pass
    (tmp_path / "results.json").write_text("{}")
    for make in (os.mkfifo, partial(os.symlink, "results.json")):
        (tmp_path / ".lock").unlink()
        make(tmp_path / ".lock")
        with pytest.raises(ConfigError, match=r"/\.lock is no file: give another hydra"), run_lock(tmp_path):
            pass
    assert (tmp_path / "results.json").read_text() == "{}"


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    run = Run(tmp_path / "run", ["seed=1"])
    with run.lock(), run.recording():
        run.record["threads"] = 3
        run.record_resume(5)
    assert run.console.quiet
    assert not (tmp_path / "run").exists()
