"""Records that no run has written: one line says what is wrong, within bounds of time and memory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.limits import within_limits

from qnmixer.engine.sweeps.report import rows_of
from qnmixer.engine.tracking.metrics_file import MetricsFile
from qnmixer.engine.tracking.results import read_results
from qnmixer.engine.tracking.resume import resume_hint
from qnmixer.engine.tracking.run import overrides_of
from qnmixer.engine.tracking.sweep_file import read_sweep
from qnmixer.errors import DataError

BRACKETS = b"[" * 200_000
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (k + 1, k + 1, b",".join([b"*%c" % k] * 9)) for k in range(97, 117)
)
SWEEP = {"overrides": [], "varying": [], "git_commit": None, "jobs": None}


def rows(folder: Path) -> object:
    return MetricsFile(folder, resumed_at=9).rows_before(), MetricsFile(folder, resumed_at=9).last_step()


def jobs(folder: Path) -> object:
    described = read_sweep(folder)
    return rows_of(folder, described["jobs"], described["varying"])


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("metrics.csv", b"step,a\n1,2\n\0\0\0\n", rows),
        ("metrics.csv", b"step,a\n1,caf\xe9\n", rows),
        ("metrics.csv", b"step,a\n1,2\nstep,a\n1,2\n", rows),
        ("metrics.csv", b"step,a\n1,2\nstep,a,b\n1,2,3\n", rows),
        ("metrics.csv", b"step,a\n1,2,3\n", rows),
        ("metrics.csv", b"step,a\n1\n", rows),
        ("metrics.csv", b"a,b\n1,2\n", rows),
        ("metrics.csv", b"step,a\n" + b"1" * 5000 + b",2\n", rows),
        ("metrics.csv", b"step,a\n1," + b"x" * 200_000 + b"\n", rows),
        (".hydra/overrides.yaml", BOMB, overrides_of),
        (".hydra/overrides.yaml", b"", overrides_of),
        (".hydra/overrides.yaml", b"- {a: b}\n", overrides_of),
        (".hydra/overrides.yaml", b"a: b\n", overrides_of),
        (".hydra/overrides.yaml", b"- [\n", overrides_of),
        (".hydra/overrides.yaml", b'- !!int ""\n', overrides_of),
        (".hydra/overrides.yaml", b'- !!bool "zz"\n', overrides_of),
        (".hydra/overrides.yaml", b'- !!timestamp "x"\n', overrides_of),
        (".hydra/overrides.yaml", b"- !!python/object:os.x\n", overrides_of),
        (".hydra/overrides.yaml", b"- caf\xe9\n", overrides_of),
        (".hydra/overrides.yaml", BRACKETS, overrides_of),
        ("results.json", BRACKETS, read_results),
        ("results.json", b'{"a": ' * 200_000, read_results),
        ("results.json", b"{}" + b" " * 2**24, read_results),
        ("results.json", b'{"overrides": [1, {}]}', overrides_of),
        ("results.json", b'{"overrides": "seed=1"}', overrides_of),
        ("results.json", b'{"status": ["done"]}', read_results),
        ("results.json", b'{"overrides": "a\\nb"}', read_results),
        ("results.json", b'{"status": "done", "steps": "many"}', read_results),
        ("results.json", b'{"status": "done", "best": [1]}', read_results),
        ("sweep.json", json.dumps(SWEEP | {"jobs": ["0"]}).encode(), jobs),
        ("sweep.json", json.dumps(SWEEP | {"jobs": {"0": "seed=1"}}).encode(), jobs),
        ("sweep.json", json.dumps(SWEEP | {"varying": 3}).encode(), jobs),
        ("sweep.json", BRACKETS, jobs),
    ],
    ids=lambda it: it[:40].decode("latin-1") if isinstance(it, bytes) else None,
)
def test_a_damaged_record_is_one_line(
    tmp_path: Path, name: str, content: bytes, read: Callable[[Path], object]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with within_limits(), pytest.raises(DataError, match=r"is damaged, or another program wrote it \(.*\): ") as error:
        read(tmp_path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < len(str(path)) + 250
    assert "\n" not in str(error.value)


def test_a_job_without_results_of_its_own_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "results.json").write_text('{"status": "done", "best": {"val/psnr": -Infinity}}')
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "results.json").write_text("{}")
    (first, second) = rows_of(tmp_path, None, ["seed"])
    assert (first.monitor, first.best, second.status) == ("val/psnr", float("-inf"), "not begun")


def test_who_stops_sees_the_line_also_beside_a_bomb(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_bytes(BOMB)
    with within_limits():
        assert f"resume={tmp_path}" in resume_hint(tmp_path)
