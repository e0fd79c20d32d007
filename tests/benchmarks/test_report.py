import json
import subprocess
import sys
from pathlib import Path

REPORT = Path(__file__).with_name("report.py")


def bench(folder: Path, seconds: float) -> Path:
    """A folder with what two of the benches write."""
    folder.mkdir()
    title = "A step (× ours)"
    step = [[title, "ours", "64²", 1.0, "s", 1.0], [title, "theirs", "64²", seconds, "s", seconds]]
    step.append([title, "absent", "64²", "not installed", "s", None])
    for name, rows in {"step": step, "memory": [["The plan", "demo", "peak", 1234.5, "MiB", None]]}.items():
        (folder / f"{name}.json").write_text(json.dumps({"machine": "abacus, 2 cores", "rows": rows}))
    return folder


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, REPORT, *map(str, arguments)], capture_output=True, text=True)


def test_every_figure_is_in_a_table_and_beside_that_of_before(tmp_path: Path) -> None:
    after, before = bench(tmp_path / "after", 1.5), bench(tmp_path / "before", 2.0)
    output = tmp_path / "new" / "bench.md"
    done = report(after, "--before", before, "--output", output)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output.read_text()
    assert "on one machine: abacus, 2 cores" in done.stdout
    assert "| theirs | 1.5 s (1.50); 0.75 of before |" in done.stdout
    assert "| absent | not installed |" in done.stdout
    assert "| demo | 1,234 MiB; 1.00 of before |" in done.stdout


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    done = report(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path} holds nothing that make bench wrote")
