"""The use of a private part of hydra-optuna-sweeper. If a new version of it breaks a search, look here first.

It is why `hydra-optuna-sweeper<1.4` is required. It waits for a public function that checks a search space before the
sweep begins. None is known: the sweeper reads its space when it runs, after the folder of the sweep is made.
"""

from collections.abc import Mapping
from typing import Any


def distributions_of(override: str) -> Mapping[str, Any]:
    """The distributions that an override draws from, by key; none if it gives one value.

    Raises what the sweeper raises for a space that it does not know: ValueError, AssertionError and others.
    """
    from hydra_plugins.hydra_optuna_sweeper._impl import create_params_from_overrides  # of an extra

    distributions, _ = create_params_from_overrides([override])
    return distributions
