"""Text is taken as it was typed.

Hydra and YAML read an unquoted 1.10, 1e3 or 1_000 as a number, and YAML also 001, 0x10 and 12:30. As the value of a key
that is text this would be another text: patient 1.10 would be patient 1.1.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.compose import key_of
from qnmixer.errors import ConfigError

_QUOTED_OR_BARE = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s,\[\]{}()=:"']+""")


def check_texts(overrides: list[str], config: DictConfig, checked: Any) -> None:
    """Raise ConfigError for a number where the config needs text, unless it was typed as the text would be.

    So data.val_patients=[1,2] is fine, [1.10] is not. A number in a file is refused: its spelling is gone.

    Args:
        overrides: of the command line, also those of a sweep.
        config: composed from them.
        checked: the same with all keys of their types: a section of pydantic, a dataclass or a dict.
    """
    for key, number in _numbers_as_text(OmegaConf.to_container(config), checked):
        typed = [word for word in overrides if f"{key}.".startswith(f"{key_of(word)}.")]
        if not typed:
            raise ConfigError(
                f"{key} is text, but a config file gives the number {number}: put quotes around it there, so that it "
                "is taken as written"
            )
        for token in _odd_numbers(typed[-1]):
            if _number(token) == number or key_of(typed[-1]) == key:  # else it is of another key of {…}
                raise ConfigError(
                    f"{key} is text, but {token} was read as the number {_number(token)}: put quotes around it, "
                    f"{shlex.quote(quoted_numbers(typed[-1]))}"
                )


def quoted_numbers(override: str) -> str:
    """The override with quotes around the numbers that Hydra would spell in another way."""
    key, equal, value = override.partition("=")
    text = _QUOTED_OR_BARE.sub(lambda match: f'"{match[0]}"' if _is_odd(match[0]) else match[0], value)
    return f"{key}{equal}{text}"


def has_odd_numbers(overrides: list[str]) -> bool:
    """Whether a number of these would be another text than the one that was typed."""
    return any(_odd_numbers(word) for word in overrides)


def _numbers_as_text(value: Any, checked: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Numbers of a config that became text when it was checked, each with its key."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            its = _part(checked, str(name))
            if its is None and not key:  # the config of plan and doctor holds that of a run
                its = _part(_part(checked, "run"), str(name))
            yield from _numbers_as_text(item, its, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        items = checked if isinstance(checked, list | tuple) else [checked] * len(value)
        for item, its in zip(value, items, strict=False):
            yield from _numbers_as_text(item, its, key)
    elif isinstance(value, int | float) and not isinstance(value, bool) and isinstance(checked, str):
        yield key, value


def _part(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)


def _odd_numbers(override: str) -> list[str]:
    return [token for token in _QUOTED_OR_BARE.findall(override.partition("=")[2]) if _is_odd(token)]


def _is_odd(token: str) -> bool:
    """Whether a word is a number that as text would be another word."""
    number = _number(token)
    return number is not None and str(number) != token


def _number(token: str) -> int | float | None:
    """A word as the number that Hydra takes it for; None for text."""
    if not re.search(r"\d", token) or re.match(r"[+-]?0[\d_]", token):  # 01 is text for Hydra
        return None
    for kind in (int, float):
        try:
            return kind(token)
        except ValueError:
            continue
    return None
