"""Sections that say what they build: `_target_`, and the arguments of the target as keys beside it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(kw_only=True)
class Custom:
    """A class or function, and its arguments.

    Attributes:
        _target_: module.name of the class or function.
        arguments: what the section has beside the keys of its schema. The target gets them by name.
    """

    _target_: str
    arguments: dict[str, Any] = field(default_factory=dict)


def split_arguments(schema: type[Custom], value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of a section that its schema knows, and its arguments."""
    known = {f.name for f in fields(schema)} - {"arguments"}
    return (
        {key: item for key, item in value.items() if key in known},
        {str(key): item for key, item in value.items() if key not in known},
    )


def keys_of(section: Any) -> dict[str, Any]:
    """The keys of a section as a command line has them: arguments of a target stand beside the others."""
    keys = asdict(section)
    return keys | keys.pop("arguments") if isinstance(section, Custom) else keys
