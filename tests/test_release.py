"""What packages say: links and licences that hold on a package index, and the version in its places."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from .pages import README, ROOT, script

REPOSITORY = "https://github.com/somebody/qnmixer"
CARD = ROOT / "src" / "qnmixer" / "weights" / "qn_mixer_256_64views.md"


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`.ci/release.py` over a checkout of its own, with the files that a release reads and writes."""
    module = script(ROOT / ".ci" / "release.py")
    checkout = tmp_path / "checkout"
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", module.ADDRESS):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    monkeypatch.setattr(module, "ROOT", checkout)
    for variable in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(variable, "nobody@example.org")
    return module


def git(release: ModuleType, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=release.ROOT, check=True, capture_output=True, text=True).stdout


def set_address(release: ModuleType, address: str) -> None:
    path = release.ROOT / release.ADDRESS
    path.write_text(path.read_text().replace(release.address(), address))


def make_ready(release: ModuleType) -> None:
    """Give the checkout an address and a changelog of version 99.0.0, and commit everything."""
    set_address(release, REPOSITORY)
    with (release.ROOT / "CHANGELOG.md").open("a") as file:
        file.write("\n## 99.0.0\n")
    git(release, "init", "--quiet")
    git(release, "add", "--all")
    git(release, "commit", "--quiet", "--message", "start")


def test_every_link_of_the_readme_leads_to_a_file_of_the_repository(release: ModuleType) -> None:
    release.ROOT = ROOT  # its links are those of this checkout
    text = release.absolute(README.read_text(), "https://a.b/c", "v1")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    ours = [re.fullmatch(r"https://a\.b/c/(raw|blob|tree)/v1/([^#]+)(#.*)?", target) for target in targets]
    places = [(match[1], ROOT / match[2]) for match in ours if match]
    assert [path for kind, path in places if not (path.is_dir() if kind == "tree" else path.is_file())] == []
    assert {path.suffix for kind, path in places if kind == "raw"} == {".png"}
    of_the_web = "[a](https://d.e/f) [b](#heading)"
    assert release.absolute(of_the_web, "https://a.b/c", "v1") == of_the_web


def test_the_address_of_the_repository_stands_in_one_place(release: ModuleType) -> None:
    listed = subprocess.run(["git", "grep", "-l", release.address()], cwd=ROOT, capture_output=True, text=True)
    assert {*listed.stdout.split()} - {"CITATION.cff"} == {release.ADDRESS}  # a release writes it into the citation


def test_one_command_writes_commits_and_tags_a_version(release: ModuleType) -> None:
    make_ready(release)
    for _ in range(2):  # the second finds the lines that the first wrote
        release.release("99.0.0")
        citation = (release.ROOT / "CITATION.cff").read_text()
        assert release.version() == "99.0.0"
        assert len(re.findall(r"^version: 99\.0\.0$", citation, re.MULTILINE)) == 1
        assert len(re.findall(r"^date-released: \d{4}-\d\d-\d\d$", citation, re.MULTILINE)) == 1
        assert len(re.findall(rf"^repository-code: {REPOSITORY}$", citation, re.MULTILINE)) == 1
        assert git(release, "tag", "--points-at", "HEAD") == "v99.0.0\n"
        assert git(release, "status", "--porcelain") == ""
        git(release, "tag", "--delete", "v99.0.0")
        (release.ROOT / "CITATION.cff").write_text(citation.replace("99.0.0", "98.0.0"))
        git(release, "commit", "--quiet", "--all", "--message", "as before")


@pytest.mark.parametrize(("number", "said"), [
    ("", "no version: for instance make release VERSION=0.2.0"),
    ("98.0.0", "write a section '## 98.0.0'"),
    ("99.0.0", "git commit or git stash"),
])  # fmt: skip
def test_a_release_that_is_not_ready_changes_nothing(release: ModuleType, number: str, said: str) -> None:
    make_ready(release)
    (release.ROOT / "new.txt").write_text("not committed")
    version = release.version()
    with pytest.raises(release.ReleaseError, match=re.escape(said)):
        release.release(number)
    assert git(release, "tag") == ""
    assert release.version() == version


def test_a_release_needs_the_address_of_the_repository(release: ModuleType) -> None:
    set_address(release, "https://example.org/OWNER/NAME")
    with pytest.raises(release.ReleaseError, match=r"docs/site/mkdocs\.yml .* in place of OWNER/NAME"):
        release.release("0.2.0")


def test_every_collection_behind_the_weights_has_a_licence_and_an_address() -> None:
    """And the packages carry this card with their licence."""
    (table,) = re.findall(r"^\| collection \|.*\n\|[-|]+\n((?:\|.*\n)+)", CARD.read_text(), re.MULTILINE)
    rows = [line.strip("| \n").split(" | ") for line in table.splitlines()]
    assert len(rows) > 10
    assert [row for row in rows if not row[1].startswith(("CC BY ", "BSD-")) or "](https://" not in row[2]] == []
    carried = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    assert CARD in [path for pattern in carried for path in ROOT.glob(pattern)]
