"""Promise 8: No file of another's executes code, writes outside, or reaches the network.

What is the user's own: the key `fit` names the function that trains, in one process and in each rank.
"""

from pathlib import Path

import pytest

from ..conftest import PHANTOMS, TINY
from .commands import Command

FIT = """
from pathlib import Path
from qnmixer.fit import fit as ours

NUMBER = 1


def fit(config, run):
    from qnmixer.runs.processes.process import rank

    Path(f"{run.folder}/fitted.{rank()}").write_text(config.fit)
    return ours(config, run)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "my_ct").mkdir()
    (tmp_path / "my_ct" / "fit.py").write_text(FIT)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [
    (["strategy=single"], 1),
    *(
        pytest.param([f"strategy={name}", "trainer.devices=2"], 2, marks=[pytest.mark.long] * (name != "ddp"))
        for name in ("ddp", "fsdp", "pipeline")
    ),
], ids=lambda value: value[0].removeprefix("strategy=") if isinstance(value, list) else str(value))  # fmt: skip
def test_it_trains_in_every_process(here: Path, command: Command, strategy: list[str], ranks: int) -> None:
    words = [*TINY, *PHANTOMS, *strategy, "fit=my_ct.fit.fit"]
    assert command(here, "train", *words, "hydra.run.dir=run").code == 0
    assert [path.read_text() for path in sorted(here.glob("run/fitted.*"))] == ["my_ct.fit.fit"] * ranks
    # A run goes on by its own function. Evaluation does not train, so it needs no word of trust.
    for path in here.glob("run/fitted.*"):
        path.unlink()
    assert command(here, "train", "resume=run", "trainer.max_steps=6").code == 0
    assert len([*here.glob("run/fitted.*")]) == ranks
    if ranks == 1:
        assert command(here, "evaluate", "run=run", "accelerator=cpu", "hydra.run.dir=scores").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("target", "message"), [
    ("nowhere.fit", "fit=nowhere.fit, but there is no module nowhere: put nowhere.py into the folder"),
    ("fit", "fit=fit is not module.name"),
    ("my_ct.fit.fti", "fit=my_ct.fit.fti: there is no fti in "),
    ("my_ct.fit.NUMBER", "fit=my_ct.fit.NUMBER is not a function (config, run)"),
])  # fmt: skip
def test_a_slip_is_one_line(here: Path, command: Command, target: str, message: str) -> None:
    outcome = command(here, "train", *TINY, *PHANTOMS, f"fit={target}", "hydra.run.dir=run")
    assert outcome.error.startswith(message)
