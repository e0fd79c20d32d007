"""Keys and values of the overrides of a command line."""

import pytest

from qnmixer.engine.config import parse
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.overrides import with_length


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        (["trainer.max_epochs=10"], (-1, 10)),
        (["experiment=demo", "trainer.max_epochs=10"], (-1, 10)),
        (["trainer.max_epochs=10", "debug=few_batches"], (-1, 10)),
        (["trainer.max_epochs=10", "trainer.max_steps=7"], (7, 10)),
        (["experiment=demo"], (700, None)),
        (["trainer.max_epochs=null"], (10000, None)),
        (["experiment=paper_aapm", "data.root=/ct"], (-1, 50)),
    ],
)
def test_epochs_given_alone_are_the_only_limit(overrides: list[str], length: tuple[int, int | None]) -> None:
    trainer = parse(compose("train", overrides)).trainer
    assert (trainer.max_steps, trainer.max_epochs) == length


def test_the_length_is_said_once() -> None:
    once = with_length(["-m", "trainer.max_epochs=2,3"])
    assert once == ["-m", "trainer.max_epochs=2,3", "trainer.max_steps=-1"]
    assert with_length(once) == once
