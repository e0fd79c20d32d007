"""The public face: it changes only with a line in CHANGELOG.md, and everything that users read stands on it."""

import hashlib
import re
from pathlib import Path

import pytest

from .pages import PAGES, ROOT
from .public import MODULES, PRIVATE, signatures

FILE = Path(__file__).with_name("public.txt")
TEMPLATE = ROOT / "src" / "qnmixer" / "template"
READ_BY_USERS = [
    *PAGES,
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    *sorted((ROOT / "notebooks" / "examples").glob("*.py")),
    *sorted(path for path in TEMPLATE.rglob("*") if path.suffix in (".py", ".ipynb", ".md")),
]


def test_a_change_of_a_public_name_is_in_the_changelog() -> None:
    """The digest in CHANGELOG.md changes with the file, so nobody writes the file anew without opening it."""
    text = FILE.read_text(encoding="utf-8")
    way = "write the change into CHANGELOG.md, then: python tests/public.py > tests/public.txt"
    assert signatures() == text.splitlines(), way
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert f"<!-- public names: {digest} -->" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), way


@pytest.mark.parametrize("path", READ_BY_USERS, ids=lambda path: path.name)
def test_what_users_read_imports_public_modules_only(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert PRIVATE.findall(text) == []
    imported = re.findall(r"^\W*(?:from|import) (qnmixer[.\w]*)", text, re.MULTILINE)
    assert {*imported} - {*MODULES, "qnmixer.train"} == set()
