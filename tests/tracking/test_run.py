import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.tracking.run import Run


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def as_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_a_run_is_recorded_while_it_goes_and_resumed_with_what_it_knew(tmp_path: Path) -> None:
    run = Run(tmp_path, ["seed=1"])
    with contextlib.suppress(KeyboardInterrupt), run.recording():
        run.note("warnings", {"step": 3})
        assert [entry["step"] for entry in read(tmp_path)["warnings"]] == [3]  # it may be killed
        assert read(tmp_path)["status"] == "running"
        raise KeyboardInterrupt
    assert read(tmp_path)["status"] == "interrupted"

    again = Run(tmp_path, ["seed=1", f"resume={tmp_path}"], str(tmp_path))
    assert again.resumes_in_place
    with again.recording():
        again.record_resume(5)
    assert again.resumed_at == 5
    record = read(tmp_path)
    assert (record["status"], record["overrides"]) == ("done", ["seed=1"])
    assert (record["warnings"][0]["step"], record["resumed"][0]["step"]) == (3, 5)


def test_a_refused_resume_leaves_the_overrides_of_the_run(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), Run(tmp_path, ["seed=1"]).recording():
        raise KeyboardInterrupt
    again = Run(tmp_path, ["seed=2", f"resume={tmp_path}"], str(tmp_path))
    with contextlib.suppress(ValueError), again.recording():
        raise ValueError
    assert (read(tmp_path)["status"], read(tmp_path)["overrides"]) == ("failed", ["seed=1"])
    with again.recording():
        again.record_resume(5)
    assert read(tmp_path)["overrides"] == ["seed=2"]


def test_a_refused_resume_leaves_a_run_that_is_done_as_it_was(tmp_path: Path) -> None:
    """Else `compare` and the table of a sweep would leave it out."""
    with Run(tmp_path, ["seed=1"]).recording():
        pass
    done = read(tmp_path)
    again = Run(tmp_path, ["seed=2", f"resume={tmp_path}"], str(tmp_path))
    with contextlib.suppress(ValueError), again.recording():
        assert read(tmp_path)["status"] == "running"
        raise ValueError
    assert read(tmp_path) == done
    again.record_end("failed", ValueError())  # as the process does that watches the ranks
    assert read(tmp_path) == done
    with contextlib.suppress(ValueError), again.recording():
        again.record_resume(5)
        raise ValueError
    again.record_end("failed", ValueError("rank 1"))
    assert (read(tmp_path)["status"], read(tmp_path)["error"]) == ("failed", "ValueError: rank 1")


@pytest.mark.parametrize(("processes", "threads"), [(1, 2), (4, None)])
def test_a_resumed_run_keeps_the_threads_of_a_single_process(
    tmp_path: Path, processes: int, threads: int | None
) -> None:
    """Several processes share the cores: one alone would train on a part of them."""
    (tmp_path / "results.json").write_text(json.dumps({"threads": 2, "processes": processes}))
    assert Run(tmp_path, [f"resume={tmp_path}"], str(tmp_path)).threads == threads
    assert Run(tmp_path / "new").threads is None


def test_a_run_from_the_checkpoint_of_another_one_has_a_record_of_its_own(tmp_path: Path) -> None:
    with Run(tmp_path / "a").recording():
        pass
    branch = Run(tmp_path / "b", ["seed=2"], str(tmp_path / "a"))
    assert not branch.resumes_in_place
    assert branch.resumed_at is None


def test_an_end_that_nobody_recorded(tmp_path: Path) -> None:
    Run(tmp_path, ["seed=1"]).record_end("failed", ValueError("no data"))
    assert read(tmp_path) == {"overrides": ["seed=1"], "status": "failed", "error": "ValueError: no data"}
    Run(tmp_path).record_end("interrupted")
    assert read(tmp_path) == {"overrides": ["seed=1"], "status": "interrupted"}


def test_the_lock_is_for_one_process_which_removes_half_written_files(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / f".last.ckpt.{'0a' * 16}.tmp"
    left.parent.mkdir()
    left.touch()
    with Run(tmp_path).lock():
        assert not left.exists()
        assert (tmp_path / ".lock").read_text().startswith("process ")


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_1(monkeypatch)
    run = Run(tmp_path / "run", ["seed=1"])
    with run.lock(), run.recording():
        run.record["best"] = 3
        run.record_resume(5)
    assert run.console.quiet
    assert not (tmp_path / "run").exists()
