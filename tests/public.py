"""All public names with their arguments, one a line: python tests/public.py > tests/public.txt."""

import importlib
import inspect
import re

MODULES = ("qnmixer", "qnmixer.models", "qnmixer.physics", "qnmixer.data", "qnmixer.lightning", "qnmixer.steps")
PRIVATE = re.compile(
    r"\bqnmixer\.(?:settings|runs|parallel|memory|training|evaluation|measurement|reconstruction|commands)\b"
    r"|\bqnmixer\.(?!extras)[a-z_]+\.[a-z_]+\.\w+"
)
"""Names inside of rooms: no file that users read or that a run writes has one."""


def arguments(value: object) -> str:
    """The names of its arguments, with plain defaults; "" for what is not called."""
    if hasattr(value, "model_fields"):  # a model of pydantic: its keys are those of conf/
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]  # else a TypeError
    except (TypeError, ValueError):
        return ""
    texts = []
    for parameter in parameters:
        default = parameter.default
        plain = default is None or isinstance(default, bool | int | float | str)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        has = "" if default is parameter.empty else f"={default!r}" if plain else "=…"
        texts.append(f"{stars}{parameter.name}{has}")
    return f"({', '.join(texts)})"


def signatures() -> list[str]:
    lines = []
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            lines.append(f"{module.__name__}.{name}{arguments(value)}")
            own = vars(value) if isinstance(value, type) and value.__module__.startswith("qnmixer.") else {}
            for key in sorted(key for key in own if not key.startswith("_")):
                method = getattr(own[key], "__func__", own[key])
                lines.append(f"{module.__name__}.{name}.{key}{arguments(method)}")
    return lines


if __name__ == "__main__":
    print("\n".join(signatures()))
