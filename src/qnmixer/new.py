"""Start your own project: a network, its config and an experiment in a new folder, ready to train.

python -m qnmixer.new my_project
"""

import shlex
import sys
from pathlib import Path

from qnmixer import cli
from qnmixer.errors import ConfigError

TEMPLATE = Path(__file__).parent / "template"


def new(folder: Path) -> None:
    """Write the files of a project. Raises ConfigError before it writes anything if the folder contains files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: give a new folder")
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":  # pip compiles the template's network on install
            target = folder / path.relative_to(TEMPLATE)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("x") as stream:
                stream.write(path.read_text())
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
