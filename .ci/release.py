"""Build and try the packages, and make a release.

python .ci/release.py dist              what `make dist` runs
python .ci/release.py release VERSION   what `make release VERSION=…` runs
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TWINE = "twine==7.0.0"
ADDRESS = "docs/site/mkdocs.yml"
"""The one file that has the address of the repository."""
_LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\]\()(?P<path>[^)\s#:]+)(?P<rest>(?:#[^)\s]*)?\))")


class ReleaseError(Exception):
    """A release that cannot be made, and what to do."""


def address() -> str:
    """The address of the repository, without a slash at its end."""
    (found,) = re.findall(r"repository: &repository (\S+)", (ROOT / ADDRESS).read_text(encoding="utf-8"))
    return str(found).rstrip("/")


def version() -> str:
    """The version in pyproject.toml, its one place."""
    (found,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def absolute(markdown: str, repository: str, tag: str) -> str:
    """Markdown whose relative links lead to the files of a tag of the repository.

    A package index shows README.md without the files beside it.
    """

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match["picture"] else "tree" if (ROOT / match["path"]).is_dir() else "blob"
        return f"{match['picture']}{match['text']}{repository}/{kind}/{tag}/{match['path']}{match['rest']}"

    return _LINK.sub(link, markdown)


def dist() -> None:
    """Build sdist and wheel into dist/, check them, and run three commands of the wheel outside of this checkout.

    The wheel gets the dependencies that this Python has: that pip can resolve those of its metadata is not shown.
    Needs the package index once, for twine.

    Raises CalledProcessError if a step fails, ReleaseError if a command of the wheel writes nothing.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = _source(folder / "source")
        build = f"import setuptools.build_meta as backend; backend.build_sdist({str(DIST)!r})"
        _run(sys.executable, "-c", build, cwd=source)
        (sdist,) = DIST.glob("*.tar.gz")
        # The wheel is built from the sdist: a file that the sdist lacks is missed below.
        _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(DIST), str(sdist))
        (wheel,) = DIST.glob("*.whl")
        _run(_twine(), "check", "--strict", str(sdist), str(wheel), cwd=folder)
        _try(wheel, folder)
    print(f"{sdist.relative_to(ROOT)}, {wheel.relative_to(ROOT)}: checked, installed and tried")


def _source(folder: Path) -> Path:
    """A copy of what git would commit, with the repository's address in README.md and pyproject.toml."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_symlink() or path.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder / name, follow_symlinks=False)
    repository, tag = address(), f"v{version()}"
    readme, pyproject = folder / "README.md", folder / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")
    urls = f'[project.urls]\nRepository = "{repository}"\nChangelog = "{repository}/blob/{tag}/CHANGELOG.md"\n'
    text = pyproject.read_text(encoding="utf-8").replace("[project.urls]\n", urls)
    pyproject.write_text(text, encoding="utf-8")
    return folder


def _twine() -> str:
    """Twine in an environment of its own: with its keyring it brings 20 packages that nobody needs to train."""
    command = ROOT / "build" / "twine" / "bin" / "twine"
    if not command.exists():
        _run(sys.executable, "-m", "venv", "--without-pip", str(command.parents[1]), cwd=ROOT)
        _pip("--python", str(command.with_name("python")), "install", "--no-compile", TWINE)
    return str(command)


def _try(wheel: Path, folder: Path) -> None:
    """Install the wheel into an environment of its own, and run three commands: its weights, conf, studies."""
    binaries, place = folder / "venv" / "bin", folder / "place"
    place.mkdir()
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"), cwd=folder)
    _pip("--python", str(binaries / "python"), "install", "--no-compile", "--no-deps", "--no-index", str(wheel))
    (packages,) = folder.glob("venv/lib/*/site-packages")
    # A path only: the editable installation of this checkout, a .pth file of that folder, is not followed.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    air = "import numpy; numpy.save('air.npy', numpy.full((64, 64), -1000, 'float32'))"
    _run(str(binaries / "python"), "-c", air, cwd=place)
    words = ["run=pretrained", "input=air.npy", "output=out", "accelerator=cpu"]
    _run(str(binaries / "qnmixer-reconstruct"), *words, cwd=place)
    _run(str(binaries / "qnmixer-train"), "experiment=demo", "--help", cwd=place)
    _run(str(binaries / "qnmixer-robustness"), "--help", cwd=place)
    if not (place / "out" / "air.npy").is_file():
        raise ReleaseError("qnmixer-reconstruct of the wheel wrote no out/air.npy: see _try in .ci/release.py")


def _pip(*arguments: str) -> None:
    _run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments, cwd=ROOT)


def _run(*command: str, cwd: Path) -> None:
    """Run a command without this checkout on its path. What it says is shown only if it fails."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()


def release(number: str) -> None:
    """Write the version into pyproject.toml and CITATION.cff, commit and tag it.

    Raises ReleaseError, and changes nothing, if the version or the checkout is not ready.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", number):
        raise ReleaseError(f"VERSION={number} is no version: for instance make release VERSION=0.2.0")
    if "OWNER/NAME" in address():
        raise ReleaseError(f"{ADDRESS} has no address of the repository yet: write it there in place of OWNER/NAME")
    if f"\n## {number}\n" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise ReleaseError(f"CHANGELOG.md does not say what is new: write a section '## {number}' and commit it")
    if _git("status", "--porcelain"):
        raise ReleaseError("the checkout has changes that are not committed: git commit or git stash them")
    if _git("tag", "--list", f"v{number}"):
        raise ReleaseError(f"the tag v{number} exists: take the next version")
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    _write("pyproject.toml", {r'^version = ".*"': f'version = "{number}"'})
    _write(
        "CITATION.cff",
        {
            r"^version: .*": f"version: {number}",
            r"^date-released: .*\n|^(?=license:)": f"date-released: {today}\n",
            r"^repository-code: .*\n|^(?=license:)": f"repository-code: {address()}\n",
        },
    )
    _git("commit", "--all", "--message", f"Version {number}")
    _git("tag", "--annotate", f"v{number}", "--message", f"Version {number}")
    print(f"v{number} is committed and tagged. To publish it: git push --follow-tags")


def _write(name: str, lines: dict[str, str]) -> None:
    """Replace lines of a file, each by its pattern: the first match."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for pattern, line in lines.items():
        text, n_replaced = re.subn(pattern, line, text, count=1, flags=re.MULTILINE)
        assert n_replaced == 1, (name, pattern)
    (ROOT / name).write_text(text, encoding="utf-8")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Run the command of the arguments."""
    try:
        match sys.argv[1:]:
            case ["dist"]:
                dist()
            case ["release", number]:
                release(number)
            case _:
                raise ReleaseError("no such command: make dist, or make release VERSION=0.2.0")
    except ReleaseError as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: this failed: {' '.join(map(str, error.cmd))[:200]}")


if __name__ == "__main__":
    main()
