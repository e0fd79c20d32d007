"""Schema of `callbacks`: Lightning callbacks, each with a name, a class and its arguments.

Only callbacks of the command line are built. Those in a checkpoint are dropped when it is read.
"""

from collections.abc import Mapping
from typing import Any

from qnmixer.engine.config.target import TARGET
from qnmixer.errors import ConfigError

_MEAN_WEIGHTS = "qnmixer.engine.training.weight_averaging.MeanWeights"


def parse_callbacks(callbacks: Any) -> dict[str, dict[str, Any]]:
    """Callbacks by name, without those that are null. Raises ConfigError for one without a class."""
    if not isinstance(callbacks, Mapping):
        raise ConfigError(f"callbacks={callbacks} is not a group of callbacks: choose callbacks=default")
    parsed = {}
    for name, given in callbacks.items():
        if given is not None:
            _check(f"callbacks.{name}", given)
            parsed[str(name)] = dict(given)
    return parsed


def averages_weights(callbacks: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a callback keeps a mean of the weights on the device, as callbacks=ema does."""
    return any(given[TARGET] == _MEAN_WEIGHTS for given in callbacks.values())


def _check(key: str, given: Any) -> None:
    if not isinstance(given, Mapping) or not isinstance(given.get(TARGET), str):
        raise ConfigError(f"{key} names no class: give +{key}.{TARGET}=my_file.MyClass")
    if odd := next((name for name in given if str(name).startswith("_") and name != TARGET), None):
        raise ConfigError(f"{key}.{odd} is not known: give {TARGET} and arguments of the class only")
