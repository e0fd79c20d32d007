"""Text is taken as typed: Hydra would read patient 1.10 as the number 1.1, and 1_000 as 1000."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from qnmixer.engine.config.compose import key_of

_NUMBER = re.compile(
    r"(?:(?<=[=\[,])|^)\s*([+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d[\d_]*)?|[+-]?inf|nan|true|false)\s*(?=[\],]|$)",
    re.IGNORECASE,
)
"""An item that Hydra reads as a number or a truth value."""

_FOLDERS = "hydra.run.dir", "hydra.sweep.dir"


def with_texts(words: list[str], schema: type[BaseModel]) -> list[str]:
    """Put quotes around what looks like a number in the words whose keys take text, or lists of texts.

    schema: the class of the command's config.
    """
    keys, quoted = _keys_of_texts(schema), []
    for word in words:
        key, equal, value = word.partition("=")
        name = re.sub(r"^data\.sources\.\w+\.", "data.", key_of(key))
        if equal and name in keys and not {'"', "'"} & {*value}:
            value = _NUMBER.sub(r'"\1"', value)
        quoted.append(f"{key}{equal}{value}")
    return quoted


@cache
def _keys_of_texts(schema: type[BaseModel]) -> frozenset[str]:
    keys = _keys_in(schema, "")
    return frozenset(_FOLDERS).union(key.removeprefix("run.") for key in keys)  # the field of plan and doctor


def _keys_in(hint: Any, key: str) -> Iterator[str]:
    """The keys of texts in a type: a model has further keys, a logger those of its name."""
    if hint is str:
        yield key
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        for name, field in hint.model_fields.items():
            yield from _keys_in(field.annotation, f"{key}.{name}".lstrip("."))
    else:
        for part in get_args(hint):
            yield from _keys_in(part, f"{key}.wandb" if key == "logger" and part is not str else key)
