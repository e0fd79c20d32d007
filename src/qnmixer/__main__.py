"""`python -m qnmixer`: the commands, one line each."""

import ast
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Print each command with the first sentence of its module. None is imported: some may need what is missing."""
    modules = {entry.module for entry in entry_points(group="console_scripts") if entry.value.startswith("qnmixer.")}
    for module in sorted(modules):
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
        first_line = text.partition("\n")[0]
        print(f"{f'python -m {module}':<32} {first_line.partition('. ')[0].rstrip('.')}")


if __name__ == "__main__":
    main()
