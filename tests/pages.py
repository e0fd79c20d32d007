"""README, the docs, and the code blocks in them."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
STUDIES = ROOT / "notebooks" / "studies"
SEARCH_PATH = f"hydra.searchpath=[file://{STUDIES}]"
"""The override that --config-dir notebooks/studies becomes."""
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The lines of a page's code blocks in a language, without comments."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.split(" # ")[0].strip() for name, block in found if name == language for line in block.splitlines()]
    return [line for line in lines if line]


def script(path: Path) -> ModuleType:
    """The module of a file in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> list[str]:
    return [line for page in PAGES for line in blocks(page, "bash")]
