"""Make a website of this repository, whose pages keep their places: links that hold on GitHub hold on the site too."""

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "build" / "gallery"
"""Where `make site` evaluates the shipped network before."""
PAGES = "*.md", "docs/**/*.md", "docs/site/*.css", "notebooks/**/*.md", "notebooks/**/*.png", "src/qnmixer/weights/*.md"
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//"
    r"|<link\b(?![^>]*\bcanonical)[^>]*\bhref=[\"']?(?:https?:)?//"
)


def on_files(files: Files, config: Any) -> Files:
    """Take the theme's files, and ours by their paths in the repository."""
    ours = [file for file in files if not (file.abs_src_path or "").startswith(config.docs_dir)]
    names = sorted({str(path.relative_to(ROOT)) for pattern in PAGES for path in ROOT.glob(pattern)})
    ours += [File(name, str(ROOT), config.site_dir, config.use_directory_urls) for name in names]
    made = {name: str(GALLERY / name) for name in ("page.html", "picture.png")}
    ours += [File.generated(config, f"docs/site/made/{name}", abs_src_path=path) for name, path in made.items()]
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        text, pictures = _as_markdown(path)
        ours.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        ours += [File.generated(config, f"notebooks/{name}", content=data) for name, data in pictures.items()]
    return Files(ours)


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Insert tables of README and docs, and let links to other files of the repository lead to its address."""
    place = posixpath.dirname(page.file.src_uri)
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "docs/memory.md"))

    def table(found: re.Match[str]) -> str:
        (text,) = re.findall(rf"<!-- {found[1]} -->\n(.*?)<!-- end of", pages, re.DOTALL)
        return str(text)

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(place, found[2]))
        if target.endswith(".ipynb"):
            return found[1] + found[2].removesuffix(".ipynb") + ".md" + found[3]
        if ":" in found[2] or files.get_file_from_path(target) is not None or not (ROOT / target).exists():
            return found[0]  # of the site, of the web, or wrong: then mkdocs says so
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{found[1]}{config.extra['repository']}/{kind}/main/{target}{found[3]}"

    markdown = re.sub(r"^(!\[.*\]\((.*)\))$", r"[\1](\2)", markdown, flags=re.MULTILINE)  # a phone opens it alone
    return _LINK.sub(link, re.sub(r"<!-- table: (\w+) -->", table, markdown))


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Raise PluginError for a page that makes a browser load something from another server."""
    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} would load from another server: {output[found.start() :][:200]}")
    return output


def _as_markdown(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook with its outputs, and its pictures by name."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(png))
                parts.append(f"![output of the cell above]({name})")
            elif text := "".join(output.get("text", output.get("data", {}).get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
