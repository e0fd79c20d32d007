"""Arguments of Lightning's Trainer: passed on, or refused with what to use instead."""

import inspect

import lightning as L
import pytest

from qnmixer.engine.config import parse, to_plain
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.keys import answers
from qnmixer.engine.config.sections import PASSED_ON, TRAINER_KEYS
from qnmixer.errors import ConfigError

REFUSED = answers()["trainer"]


def test_every_argument_of_the_trainer_is_taken_or_answered() -> None:
    theirs = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    assert theirs <= TRAINER_KEYS | PASSED_ON | REFUSED.keys()
    assert PASSED_ON | REFUSED.keys() <= theirs
    assert not TRAINER_KEYS & (PASSED_ON | REFUSED.keys())
    assert not PASSED_ON & REFUSED.keys()


def test_what_is_passed_on_is_kept_and_read_back() -> None:
    given = ["+trainer.max_time=00:00:01:00", "+trainer.profiler=simple", "+trainer.limit_train_batches=3"]
    config = parse(compose("train", given))
    assert config.trainer.extra == {"max_time": "00:00:01:00", "profiler": "simple", "limit_train_batches": 3}
    assert parse(to_plain(config)) == config


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_break_a_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^trainer\.{name} cannot be set: .*") as error:
        parse(compose("train", [f"+trainer.{name}=1"]))
    assert any(word in str(error.value) for word in ("use ", "leave it out"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+trainer.max_time=an_hour", "is not DAYS:HOURS:MINUTES:SECONDS"),
        ("+trainer.profiler=simpel", "did you mean simple?"),
        ("+trainer.limit_train_batches=0", "too small"),
        ("+trainer.limit_train_batches=1.5", "too large for a share"),
        ("+trainer.limit_train_batches=few", "is not a number"),
        ("+trainer.min_steps=0", "too small"),
        ("+trainer.benchmark=3", "is neither true nor false"),
        ("+trainer.extra={foo: 1}", "trainer.extra.foo is not known"),
        ("+trainer.limit_train_batch=3", "did you mean trainer.limit_train_batches?"),
    ],
)
def test_values_are_checked(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(compose("train", [override]))
    assert message in str(error.value)


def test_an_epoch_ends_with_a_whole_step() -> None:
    with pytest.raises(ConfigError, match=r"no multiple of trainer\.accumulate_grad_batches=2"):
        parse(compose("train", ["+trainer.limit_train_batches=3", "trainer.accumulate_grad_batches=2"]))
