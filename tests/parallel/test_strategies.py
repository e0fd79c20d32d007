from dataclasses import replace

import pytest

from qnmixer.engine.config import Config
from qnmixer.engine.config.sections import StrategyConfig
from qnmixer.engine.memory.plan import Planner
from qnmixer.engine.parallel.strategies import build_strategy
from qnmixer.errors import ConfigError


@pytest.fixture
def with_another(tiny_config) -> Config:
    """A run with a strategy that has a schema, and nothing else."""
    return replace(tiny_config(), strategy=StrategyConfig(name="dpp"))


def test_a_name_without_a_strategy_is_refused(with_another: Config) -> None:
    with pytest.raises(ConfigError, match=r"^strategy=dpp is not known: did you mean ddp\?$"):
        build_strategy(with_another)


def test_what_does_not_say_how_to_count_it_is_not_planned(with_another: Config) -> None:
    with pytest.raises(ConfigError, match=r"^strategy=dpp cannot be planned: .* planned_as=None, not replica, shards"):
        Planner(with_another).devices(with_another)
