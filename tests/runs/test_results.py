import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from qnmixer.runs import records as room
from qnmixer.runs.records import PACKAGES, git_commit, git_diff
from qnmixer.runs.records import read_results as read
from qnmixer.runs.run import Run


@pytest.mark.parametrize(("error", "status"), [
    (None, "done"), (ValueError("bad\nlines"), "failed"), (SystemExit(3), "failed"),
    (KeyboardInterrupt(), "interrupted"),
])  # fmt: skip
def test_what_was_known_stays_and_an_error_passes_on(tmp_path: Path, error: BaseException | None, status: str) -> None:
    with suppress(BaseException), Run(tmp_path / "new", ["seed=1"]).recording() as record:
        running = read(tmp_path / "new")
        record |= {"best": {"val/psnr": 30.5}, "picture": tmp_path / "a.png"}
        if error is not None:
            raise error
    assert running["status"] == "running"
    ended = read(tmp_path / "new")
    assert (ended["status"], ended["overrides"], ended["best"]) == (status, ["seed=1"], {"val/psnr": 30.5})
    assert ended["picture"] == str(tmp_path / "a.png")
    assert ended.get("error") == (f"{type(error).__name__}: {error}" if status == "failed" else None)
    assert set(ended["versions"]) == {"python", *PACKAGES}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["results.json"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in which the module stands where it stands in this one."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    runs = tmp_path / "src" / "qnmixer" / "runs"
    runs.mkdir(parents=True)
    (runs / "records.py").write_text("# stands for the module\n")
    (tmp_path / "src" / "qnmixer" / "train.py").write_text("# a\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    monkeypatch.setattr(room, "__file__", str(runs / "records.py"))
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_changes_of_the_code_are_distinguished(checkout: Path) -> None:
    clean = git(checkout, "rev-parse", "HEAD")
    found = [git_commit()]
    for path in ("src/qnmixer/train.py", "src/qnmixer/new.py"):
        for change in ("# changed\n", "# changed again\n"):
            (checkout / path).write_text(change)
            found.append(git_commit())
    assert found[0] == clean
    assert all(str(it).startswith(f"{clean}+changes.") for it in found[1:])
    assert len(set(found)) == len(found)


def test_changes_are_the_same_in_any_state_of_the_users_index(checkout: Path) -> None:
    """Staged, in the middle of a merge, and without an index."""
    script, trees, index = checkout / "src" / "qnmixer" / "train.py", [], checkout / ".git" / "index"
    for text in ("# theirs\n", "# ours\n"):
        for path in (script, script.with_name("new.py")):
            path.write_text(text)
        unstaged = git_diff()
        git(checkout, "add", "-A")
        trees.append(git(checkout, "write-tree"))
        assert git_diff() == unstaged
    git(checkout, "read-tree", "-m", "HEAD", *reversed(trees))
    assert git(checkout, "ls-files", "--unmerged")
    assert git_diff() == unstaged
    index.unlink()
    assert git_diff() == unstaged
    assert unstaged.count("+# ours") == 2


def test_no_commit_without_git_or_in_somebody_elses_repository(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel in an environment inside their project, which git may even see."""
    installed = checkout / ".venv" / "site-packages" / "qnmixer"
    (installed / "runs").mkdir(parents=True)
    monkeypatch.setattr(room, "__file__", str(installed / "runs" / "records.py"))
    assert (git_commit(), git_diff()) == (None, "")
    monkeypatch.setenv("PATH", "")
    assert (git_commit(), git_diff()) == (None, "")


def test_changes_can_be_applied_to_the_commit(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Changed, new and deleted files, and configs; not what is beside the code, nor what the user has staged."""
    assert git_diff() == ""
    package = checkout / "src" / "qnmixer"
    (package / "train.py").write_text("# changed\n")
    (package / "new.py").write_text("# new: χ\n")
    (package / "runs" / "records.py").unlink()
    (checkout / "conf").mkdir()
    (checkout / "conf" / "a.yaml").write_text("a: 1\n")
    private = ["conf/.env", "conf/.hidden.yaml", "conf/local/a.yaml", "conf/notes.txt", "src/qnmixer/local_settings.py"]
    private += ["src/qnmixer/my_secrets.py", "src/qnmixer/API-Key.yaml", "notes.txt"]
    for path in private:
        (checkout / path).parent.mkdir(exist_ok=True)
        (checkout / path).write_text("a secret\n")
    status = git(checkout, "status", "--porcelain")
    diff = git_diff()
    assert "secret" not in diff
    assert git(checkout, "status", "--porcelain") == status
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", "-q", str(checkout), ".")
    (clone / "code.diff").write_text(diff)
    git(clone, "apply", "code.diff")
    assert (clone / "src" / "qnmixer" / "train.py").read_text() == "# changed\n"
    assert (clone / "src" / "qnmixer" / "new.py").read_text() == "# new: χ\n"
    assert not (clone / "src" / "qnmixer" / "runs" / "records.py").exists()
    assert (clone / "conf" / "a.yaml").is_file()
    assert not (clone / "notes.txt").exists()
