"""Text is taken as typed. Hydra would read patient 1.10 as the number 1.1, and takes no = or ~ or é without quotes."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from qnmixer.engine.config.compose import key_of

_ITEM = re.compile(r"(?:^|(?<=[\[,]))\s*([^\s\[\](){},'\"\\](?:[^\[\](){},'\"\\]*[^\s\[\](){},'\"\\])?)\s*(?=[\],]|$)")
"""A text, alone or in a list, without quotes, brackets and blanks around it."""
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d[\d_]*)?|[+-]?inf|nan|true|false", re.IGNORECASE)
"""What Hydra reads as a number or a truth value."""
_PLAIN = re.compile(r"[\w/+.$%*@?|:\s-]*", re.ASCII)
"""What Hydra takes as a text."""

_FOLDERS = "hydra.run.dir", "hydra.sweep.dir"


def with_texts(words: list[str], schema: type[BaseModel]) -> list[str]:
    """Put quotes around numbers, and what Hydra would not take, in words whose keys take text, or lists of texts.

    schema: the class of the command's config.
    """
    keys, words_for_hydra = _keys_of_texts(schema), []
    for word in words:
        key, equal, value = word.partition("=")
        name = re.sub(r"^(?:(data)\.sources|(metrics))\.\w+\.", r"\1\2.", key_of(key))
        if equal and name in keys and not {'"', "'"} & {*value}:
            value = _ITEM.sub(_quoted, value)
        words_for_hydra.append(f"{key}{equal}{value}")
    return words_for_hydra


def _quoted(item: re.Match[str]) -> str:
    text = item[1]
    return f'"{text}"' if _NUMBER.fullmatch(text) or not _PLAIN.fullmatch(text) else item[0]


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
