"""Convert one config section from plain values to its dataclass."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from qnmixer.config.keys import flat_keys, unknown_key
from qnmixer.config.option import check_bounds
from qnmixer.config.target import TARGET, Custom, Target, split_arguments
from qnmixer.errors import ConfigError


def plain_values(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The values of a composed config, resolved; plain values unchanged. Raises ConfigError for a missing value."""
    if not isinstance(cfg, DictConfig):
        return {str(key): value for key, value in cfg.items()}
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value: give one with {error.full_key}=…") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def parse_section(section: str, schema: type, value: Any, values: Mapping[str, Any]) -> Any:
    """Convert a section to its dataclass and check types and bounds. Raises ConfigError.

    Keys that are not in the schema become arguments of its target. Text with ${…} stays text.
    """
    prefix = f"{section}." if section else ""
    arguments: dict[str, Any] = {}
    if issubclass(schema, Custom) and isinstance(value, Mapping):
        value, arguments = split_arguments(schema, value)
    if issubclass(schema, Target) and (odd := schema.odd_argument(value[TARGET], arguments)):
        raise unknown_key(f"{prefix}{odd}", list(flat_keys(values)))
    try:
        typed = OmegaConf.unsafe_merge(OmegaConf.structured(schema), as_text(value))  # merge copies both first
        parsed = OmegaConf.to_object(typed)
    except ConfigKeyError as error:
        raise unknown_key(f"{prefix}{error.full_key}", list(flat_keys(values))) from error
    except MissingMandatoryValue as error:
        raise ConfigError(f"{prefix}{error.full_key} has no value: give one with {prefix}{error.full_key}=…") from error
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        if "is not a ListConfig" in reason:
            its = value.get(error.full_key) if isinstance(value, Mapping) else None
            raise ConfigError(
                f"{prefix}{error.full_key}={its} is not a list: write {prefix}{error.full_key}=[{its}]"
            ) from error
        raise ConfigError(f"{prefix}{error.full_key or ''}: {reason}") from error
    check_bounds(prefix, parsed)
    return replace(parsed, arguments=arguments) if isinstance(parsed, Custom) else parsed


def as_text(value: Any) -> Any:
    """Values with every ${…} as plain text, which OmegaConf will not resolve. `plain_values` resolved the others."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value
