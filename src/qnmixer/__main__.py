"""`python -m qnmixer`: the commands, one line each."""

from importlib import import_module
from importlib.metadata import entry_points


def main() -> None:
    """Print each command with the first sentence of its module. None of them loads torch."""
    modules = {entry.module for entry in entry_points(group="console_scripts") if entry.value.startswith("qnmixer.")}
    for module in sorted(modules):
        first_line = (import_module(module).__doc__ or "").partition("\n")[0]
        print(f"{f'python -m {module}':<32} {first_line.partition('. ')[0].rstrip('.')}")


if __name__ == "__main__":
    main()
