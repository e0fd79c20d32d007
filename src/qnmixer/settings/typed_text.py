"""Text is taken as typed. Hydra would read patient 1.10 as the number 1.1, and takes no = or ~ or é without quotes."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from qnmixer.settings.compose import is_sweep, key_of, quoted

_QUOTED = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
_ITEM = re.compile(
    rf"{_QUOTED}|(?:^|(?<=[\[,]))\s*([^\s\[\](){{}},'\"\\](?:[^\[\](){{}},'\"\\]*[^\s\[\](){{}},'\"\\])?)\s*(?=[\],]|$)"
)
"""An item of a list or a sweep: with quotes, or a text without quotes, brackets and blanks around it."""
_FOLDERS = {"hydra.run.dir": False, "hydra.sweep.dir": False}


def with_texts(words: list[str], schema: type[BaseModel]) -> list[str]:
    """Put quotes around numbers, and what Hydra would not take, in words whose keys take text, or lists of texts.

    A backslash or quotes around a value are Hydra's.

    schema: the class of the command's config.
    """
    keys, words_for_hydra = _keys_of_texts(schema), []
    for word in words:
        key, equal, value = word.partition("=")
        is_list = keys.get(re.sub(r"^(?:(data)\.sources|(metrics))\.\w+\.", r"\1\2.", key_of(key)))
        if equal and (is_list or (is_list is not None and is_sweep(words))):
            value = _ITEM.sub(lambda item: quoted(item[1]) if item[1] else item[0], value)
        elif equal and is_list is not None and "\\" not in value and value[:1] not in ("'", '"'):
            value = quoted(value)
        words_for_hydra.append(f"{key}{equal}{value}")
    return words_for_hydra


@cache
def _keys_of_texts(schema: type[BaseModel]) -> dict[str, bool]:
    """The keys of texts, and whether each takes several."""
    return _FOLDERS | {key.removeprefix("run."): is_list for key, is_list in _keys_in(schema, "")}  # of plan, doctor


def _keys_in(hint: Any, key: str, in_list: bool = False) -> Iterator[tuple[str, bool]]:
    """The keys of texts in a type: a model has further keys, a logger those of its name."""
    if hint is str:
        yield key, in_list
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        for name, field in hint.model_fields.items():
            yield from _keys_in(field.annotation, f"{key}.{name}".lstrip("."))
    else:
        parts = get_args(hint)
        for part in parts[1:] if get_origin(hint) is dict else parts:
            place = f"{key}.wandb" if key == "logger" and get_origin(hint) is dict else key
            yield from _keys_in(part, place, in_list or get_origin(hint) is list)
