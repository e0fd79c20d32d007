"""Start your own project: a network, the training step, a loss and their config in a new folder, ready to train.

python -m qnmixer.new my_project
"""

import shlex
import sys
from pathlib import Path

from qnmixer.engine import cli
from qnmixer.errors import ConfigError

PACKAGE = Path(__file__).parent
COPIES = {"my_module.py": PACKAGE / "module.py"}
"""What a project gets of the package itself, by its name there."""


def files() -> dict[str, Path]:
    """What a project consists of: for each path in its folder, the file to copy."""
    template = PACKAGE / "template"
    # pip compiles the template's network on install
    found = {str(path.relative_to(template)): path for path in template.rglob("*") if path.suffix != ".pyc"}
    return dict(sorted((COPIES | {name: path for name, path in found.items() if path.is_file()}).items()))


def new(folder: Path) -> None:
    """Write the files of a project. Raises ConfigError before it writes anything if the folder contains files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: give a new folder")
    for name, source in files().items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as stream:
            stream.write(source.read_text(encoding="utf-8"))
        print(target)


def main() -> None:
    """The command, also as `qnmixer-new`."""
    words = sys.argv[1:]
    if {*words} & {"-h", "--help"}:
        print(__doc__.strip())
        return
    try:
        if len(words) != 1 or words[0].startswith("-"):
            raise ConfigError("give the name of one new folder: qnmixer-new my_project")
        new(Path(words[0]))
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {cli.explain(error, 'train') or error}")
    print(f"try it: cd {shlex.quote(words[0])} && qnmixer-train --config-dir conf experiment=mine")


if __name__ == "__main__":
    main()
