"""Every notebook: its code run from top to bottom, and the outputs that it is committed with."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
MOST_BYTES = 600_000

Namespace = dict[str, Any]


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check = CHECKS[path.stem]
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    n_threads = torch.get_num_threads()
    namespace: Namespace = {}
    try:
        with plt.rc_context():
            for cell in code_cells(path):
                exec(compile("".join(cell["source"]), str(path), "exec"), namespace)
    finally:
        plt.close("all")
        torch.set_num_threads(n_threads)
    check(namespace)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_without_a_browser(path: Path, tmp_path: Path) -> None:
    """As `make notebooks` runs it: in a kernel of its own."""
    words = ["--to", "notebook", "--execute", "--output-dir", str(tmp_path), str(path)]
    done = subprocess.run([sys.executable, "-m", "nbconvert", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / path.name).is_file()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_of_a_clean_run(path: Path) -> None:
    code = code_cells(path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output["name"] == "stdout" for output in outputs if output["output_type"] == "stream")
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert text
    assert not re.search(r"(?<![\w.])/\w+/|Warning", text)  # the path of a machine, a warning
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_what_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = "".join(code_cells(path)[0]["source"])
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
    exec(first, {})
    assert commands == []  # qnmixer is there
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"^qnmixer is not installed: set REPOSITORY above"):
        exec(first, {})
    monkeypatch.chdir(path.parent)  # of a clone
    exec(first, {})
    exec(first.replace('".."', '"git+https://example.org/a"'), {})
    assert [command[-1] for command in commands] == ["..[train]", "qnmixer[train] @ git+https://example.org/a"]
    assert commands[0][:-1] == [sys.executable, "-m", "pip", "install", "--quiet"]


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def check_reconstruction(found: Namespace) -> None:
    """More views are better, training beats FBP and the untrained network, recomputing costs no gradient."""
    assert found["fbp_psnr"][32] < found["fbp_psnr"][64] < found["fbp_psnr"][128]
    before, after = found["before"], found["after"]
    assert after[0] == before[0] < before[-1] < after[-1]
    assert after[-1] > after[0] + 4
    assert found["shipped_psnr"]["QN-Mixer"] > found["shipped_psnr"]["FBP"] + 8
    assert found["equal"]
    assert found["steps"]["keep"][3][0].abs().max() > 0
    peak, planned = found["peak"], found["planned"]
    assert peak["recompute"] < peak["keep"] / 4
    for mode in ("keep", "recompute"):
        assert peak[mode] == pytest.approx(planned[mode].activations / found["MIB"], rel=0.02)


def check_comparison(found: Namespace) -> None:
    """Every method has its row, best first, all on the same slices; each is better than FBP. A run's folder is read."""
    psnr = found["psnr"]
    assert {*psnr} == {"FBP", "TV", "FBPConvNet", "LEARN", "QN-Mixer"}
    assert found["ranked"][-1] == "FBP"
    assert psnr["QN-Mixer"].mean > psnr["FBP"].mean + 2
    seeds = (found["config"].seed, found["config"].data.seed)
    slices = {title: {*found["scores"](title, "psnr")[seeds]} for title in psnr}
    assert len(slices["FBP"]) == 12
    assert all(its == slices["FBP"] for its in slices.values())
    assert found["n_parameters"]["TV"] == 0 < found["n_parameters"]["QN-Mixer"]
    assert found["results"]["status"] == "done"
    assert found["again"].n_iterations == 2


CHECKS: dict[str, Callable[[Namespace], None]] = {
    "from_slice_to_reconstruction": check_reconstruction,
    "your_data_your_comparison": check_comparison,
}
