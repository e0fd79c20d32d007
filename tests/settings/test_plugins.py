import sys
from pathlib import Path

import pytest

from qnmixer.errors import PluginError
from qnmixer.settings.plugins import Kind, check_plugin, digests_of_code, is_trusted, load_plugin

ANY = Kind("a class", lambda cls: True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to start from, with a file of somebody's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    (tmp_path / "of_mine.py").write_text(
        "class Thing:\n    def __init__(self, size, *, colour='red'):\n        self.is_ = size, colour\n"
    )
    return tmp_path


@pytest.mark.parametrize(("target", "message"), [
    ("Thing", "model._target_=Thing is not module.name"),
    ("of_mine.my thing", "is not module.name"),
    ("of_yours.deep.Thing", "no module of_yours.deep: put of_yours/deep.py into the folder"),
    ("of_them.part.Thing", "there is no module of_them.part"),
    ("of_ruin.Thing", r"importing of_ruin fails \(ruin\)"),
    ("of_mine.Other", r"there is no Other in .*of_mine\.py"),
    ("sys.Nope", "there is no Nope in sys"),
])  # fmt: skip
def test_a_target_that_cannot_be_loaded_is_one_line(here: Path, target: str, message: str) -> None:
    (here / "of_ruin.py").write_text("raise SystemError('ruin')")
    check_plugin("model._target_", "of_ruin.Thing")  # which runs nothing
    (here / "of_them").mkdir()
    (here / "of_them" / "__init__.py").write_text("1 / 0")
    assert load_plugin("model._target_", "collections.abc.Sized", ANY).__name__ == "Sized"
    with pytest.raises(PluginError, match=message):
        load_plugin("model._target_", target, ANY)


@pytest.mark.parametrize(("target", "is_ours"), [
    ("qnmixer.models.fbp.FBP", True), ("of_mine.Thing", True), ("of_mine.part.Thing", True),
    ("qnmixer_too.Thing", False), ("of_mine_too.Thing", False),
])  # fmt: skip
def test_a_module_is_trusted_by_its_whole_name(target: str, is_ours: bool) -> None:
    assert is_trusted(target, ["of_mine"]) == is_ours


FILES = {
    "mine/__init__.py": "",
    "mine/net.py": "import torch, qnmixer.models\nfrom . import parts\nfrom .deep.block import Block",
    "mine/parts.py": "from beside import Loss\nimport mine.net\nimport not_there",
    "mine/deep/__init__.py": "",
    "mine/deep/block.py": "from ..far import f\nclass Block: ...",
    "mine/far.py": "def f(): import late",
    "mine/unused.py": "",
    "beside.py": "class Loss: ...",
    "late.py": "",
}


def test_a_digest_is_of_all_files_of_the_user_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are. Installed packages are not the user's."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = digests_of_code(["mine.net"])
    assert digests_of_code(["mine.net"]) == before
    changing = set()
    for name, text in FILES.items():
        (tmp_path / name).write_text(f"{text}\nx = 1\n")
        if digests_of_code(["mine.net"]) != before:
            changing.add(name)
        (tmp_path / name).write_text(text)
    assert changing == FILES.keys() - {"mine/unused.py"}
    assert digests_of_code(["nowhere.net"]) == digests_of_code(["nowhere.net"])
