import json
import subprocess
import sys
from pathlib import Path

REPORT = Path(__file__).with_name("report.py")


def bench(folder: Path, seconds: float) -> Path:
    """A folder with what two of the benches write."""
    folder.mkdir()
    steps = {
        "plain": {"seconds": 3.0, "times_as_fast": 1.0},
        "keep": {"seconds": seconds, "times_as_fast": 3 / seconds},
    }
    part = {"part": "codec", "seconds": 0.02, "ratio": 0.5, "over_floor": 7.0}
    size = {"size": 256, "T": 14, "steps": steps, "inference": {}, "parts": [part]}
    size |= {"bandwidth": 4e10, "matrix_rate": 1.8e11, "slowdown_beside_busy_core": 1.25}
    machine = {"processor": "abacus", "threads": 2, "torch": "2"}
    (folder / "step.json").write_text(json.dumps({"machine": machine, "sizes": [size]}))
    (folder / "strategies.json").write_text(json.dumps([{"variant": "fsdp", "seconds": 2.0, "ratio": 4.0}]))
    return folder


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, REPORT, *map(str, arguments)], capture_output=True, text=True)


def test_every_figure_is_in_a_table_and_beside_that_of_before(tmp_path: Path) -> None:
    after, before = bench(tmp_path / "after", 1.5), bench(tmp_path / "before", 2.0)
    output = tmp_path / "new" / "bench.md"
    done = report(after, "--before", before, "--output", output)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output.read_text()
    assert "processor abacus, threads 2, torch 2" in done.stdout
    assert "| keep | 1.5 s, 2.00 ×; 0.75 of before |" in done.stdout
    assert "| codec | 20 ms, 0.50 × (7.0); 1.00 of before |" in done.stdout
    assert "| a large copy | 40 GB/s; 1.00 of before |" in done.stdout
    assert "| a loop beside a busy core : alone | 1.25; 1.00 of before |" in done.stdout
    assert "| fsdp | 2 s, 0.25 ×; 1.00 of before |" in done.stdout


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    done = report(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path} holds nothing that make bench wrote")
