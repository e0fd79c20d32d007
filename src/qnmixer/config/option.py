"""Bounds for the fields of config dataclasses, and their check."""

import math
from dataclasses import MISSING, field, fields
from typing import Any

from qnmixer.errors import ConfigError, suggest


def one_of(*choices: str, default: Any = MISSING) -> Any:
    """A text field with a fixed list of values."""
    return field(default=default, metadata={"choices": choices})


def number(
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    default: Any = MISSING,
) -> Any:
    """A number field with bounds: inclusive (`at_least`, `at_most`) or exclusive (`above`, `below`)."""
    return field(default=default, metadata={"at_least": at_least, "above": above, "at_most": at_most, "below": below})


def check_bounds(prefix: str, section: Any) -> None:
    """Raise ConfigError for the first field of a config dataclass that is out of bounds."""
    for f in fields(section):
        value, rules = getattr(section, f.name), f.metadata
        if value is None:
            continue
        key = f"{prefix}{f.name}={value}"
        if (choices := rules.get("choices")) and value not in choices:
            raise ConfigError(f"{key} is not known: {suggest(value, choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key} is not a finite number: give one")
        if (low := rules.get("at_least")) is not None and value < low:
            raise ConfigError(f"{key} is too small: give {low} or more")
        if (low := rules.get("above")) is not None and value <= low:
            raise ConfigError(f"{key} is too small: give more than {low}")
        if (high := rules.get("at_most")) is not None and value > high:
            raise ConfigError(f"{key} is too large: give {high} or less")
        if (high := rules.get("below")) is not None and value >= high:
            raise ConfigError(f"{key} is too large: give less than {high}")
