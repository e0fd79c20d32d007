"""Keys of other templates get an answer, and keys that exist here do not."""

import pytest

from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.keys import answers, flat_keys, habit
from qnmixer.engine.config.search_path import CONF


def test_no_habit_is_a_key_or_an_option_here() -> None:
    values = compose("train", [])
    habits = answers()["habits"].keys()
    assert not habits & set(flat_keys({str(key): values[key] for key in values if not str(key).startswith("_")}))
    for option in habits:
        group, _, name = option.partition("=")
        assert not (CONF / group / f"{name}.yaml").exists()


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["seed=1", "+ckpt_path=a.ckpt"], "ckpt_path is not known here: resume=RUN_FOLDER"),
        (["trainer=ddp", "seed=1"], "trainer=ddp is not known here: use strategy=ddp"),
        (["trainer.devices=auto"], "trainer.devices=auto is not known here: leave it out"),
        (["trainer=slurm", "optimizer.lr=1", "-m"], None),
    ],
)
def test_the_first_habit_is_answered(overrides: list[str], answer: str | None) -> None:
    found = habit(overrides)
    assert found == answer if answer is None else found is not None and found.startswith(answer)
