"""README, the docs, and the code blocks in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The lines of a page's code blocks in a language, without comments."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.split(" # ")[0].strip() for name, block in found if name == language for line in block.splitlines()]
    return [line for line in lines if line]


def commands() -> list[str]:
    return [line for page in PAGES for line in blocks(page, "bash")]
