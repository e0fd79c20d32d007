"""Start your own project: a network, a loss, slices, a training step, a run, tests and their config, ready to train.

python -m qnmixer.new my_ct

It writes the folder my_ct, with the package my_ct in it. All of it is yours. `make train` and `make test` run there.
"""

import json
import keyword
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import qnmixer.needs_train  # noqa: F401

from qnmixer.errors import ConfigError
from qnmixer.settings.error_lines import explain
from qnmixer.torch_builds import TORCH, installed_build, is_on_pypi, pinned

PACKAGE = Path(__file__).parent
TEMPLATE = PACKAGE / "template"
TOP = (
    ".github", ".gitignore", "Makefile", "README.md", "notebooks", "pyproject.toml", "src", "tests", "wandb_sweep.yaml",
)  # fmt: skip
"""What a project has at its top. Linters leave caches beside it."""
NAME, DISTRIBUTION = "my_ct", "my-ct"
"""What stands in the template for the project's name, and for its name as a distribution."""
INSTALLED = "qnmixer[train,dicom]"  # this library with the extras that a project needs


def files(name: str) -> Iterator[tuple[Path, str]]:
    """The files of a project: the path of each in its folder, and its text."""
    paths = [TEMPLATE / top for top in TOP] + [path for top in TOP for path in (TEMPLATE / top).rglob("*")]
    words = {"QNMIXER": dependency(), "TORCH_HERE": torch_here(), "CLONE_HERE": clone(), NAME: name}
    words[DISTRIBUTION] = name.replace("_", "-").lower()
    for path in sorted(path for path in paths if path.is_file()):
        if path.suffix != ".pyc":  # pip compiles the template on install
            place = Path(*(name if part == NAME else part for part in path.relative_to(TEMPLATE).parts))
            text = path.read_text(encoding="utf-8")
            for word, value in words.items():
                text = text.replace(word, value)
            yield place.with_name(place.name.replace(NAME, name)), text


def clone() -> str:
    """The address of the clone that this file is in; "" if it is none, whoever put it on the path."""
    source = PACKAGE.parents[1]
    return source.as_uri() if PACKAGE.parent.name == "src" and (source / "pyproject.toml").is_file() else ""


def torch_here() -> str:
    """The installed build of torch, as pip takes it; "" for one that pip would not find."""
    build = installed_build()
    if build is None:
        return ""
    return f"torch=={TORCH}" if is_on_pypi(build) else " ".join(pinned(build))


def dependency() -> str:
    """This library as pip takes it, and as it was installed: a folder, a wheel, an address, or a version.

    Raises ConfigError for a copy that pip does not know.
    """
    if address := clone():
        return f"{INSTALLED} @ {address}"
    for distribution in distributions(name="qnmixer"):
        if Path(str(distribution.locate_file("qnmixer"))).resolve() == PACKAGE.resolve():
            origin = distribution.read_text("direct_url.json")
            place = f"=={distribution.version}" if origin is None else f" @ {_address(json.loads(origin))}"
            return f"{INSTALLED}{place}"
    raise ConfigError(f"{PACKAGE} is not installed: pip install qnmixer first, so that a project can name it")


def _address(origin: dict[str, Any]) -> str:
    """The address of a distribution, from what pip has written about it (PEP 610)."""
    url = str(origin["url"])
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return f"{url}#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else url


def check_name(name: str) -> None:
    """Raise ConfigError for a name that no package can have, or that another has."""
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name} cannot be the name of a Python package: give letters, digits and _, as my_ct")
    spec = None if name in sys.stdlib_module_names else find_spec(name)
    exists = name in sys.stdlib_module_names or any(distributions(name=name))
    # A plain folder in the current one is found too, as a package without a file.
    if exists or (spec is not None and spec.origin is not None):
        raise ConfigError(f"there is a module {name} already: give another name, as my_{name}")


def new(folder: Path) -> None:
    """Write the files of a project. Raises ConfigError before it writes anything if name or folder will not do."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: give a new folder")
    check_name(folder.absolute().name)
    for place, text in files(folder.absolute().name):
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as stream:
            stream.write(text)
        print(target)


def main() -> None:
    """The command, also as `qnmixer-new`."""
    words = sys.argv[1:]
    if {*words} & {"-h", "--help"}:
        print(__doc__.strip())
        return
    try:
        if len(words) != 1 or words[0].startswith("-"):
            raise ConfigError("give the name of one new folder: qnmixer-new my_ct")
        new(Path(words[0]))
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {explain(error, 'train') or error}")
    print(f"try it: cd {shlex.quote(words[0])} && make train")


if __name__ == "__main__":
    main()
