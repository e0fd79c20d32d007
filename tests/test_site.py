"""The website's pages and hooks. `make site`, which .ci/run calls, builds it and checks its links."""

from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

from .pages import ROOT, blocks, commands, script

SITE = ROOT / "docs" / "site"
HOOKS = script(SITE / "hooks.py")


def test_commands_of_the_site_are_those_that_other_pages_have_and_tests_run() -> None:
    found = [line for page in SITE.glob("*.md") for line in blocks(page, "bash")]
    assert found
    assert {*found} <= {*commands()}


def test_links_to_other_files_lead_to_the_repository() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="docs/compare.md"))
    files = SimpleNamespace(get_file_from_path={"docs/data.md": 1}.get)
    config = SimpleNamespace(extra={"repository": "https://a.b/c"})

    def written(text: str) -> str:
        return HOOKS.on_page_markdown(text, page, config, files)

    assert written("[a](../src/qnmixer/fit.py#L3)") == "[a](https://a.b/c/blob/main/src/qnmixer/fit.py#L3)"
    assert written("[a](../conf/data)") == "[a](https://a.b/c/tree/main/conf/data)"
    assert written("[a](../notebooks/x.ipynb)") == "[a](../notebooks/x.md)"
    kept = "[a](data.md#the-scan) [b](none.md) [c](https://d.e/f) [g](#h)"  # mkdocs finds that none.md is wrong
    assert written(kept) == kept
    assert written("<!-- table: levers -->").count("| `memory=recompute` |") == 1


@pytest.mark.parametrize("tag", [
    '<script async src="https://a.b/c.js">', "<img alt=a src=//a.b/c.png>",
    '<link rel="stylesheet" href="https://fonts.googleapis.com/css">',
])  # fmt: skip
def test_a_page_loads_nothing_from_another_server(tag: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    own = '<script src="../a.js"></script><link rel="canonical" href="https://a.b/"><a href="https://c.d">e</a>'
    assert HOOKS.on_post_page(own, page, None) == own
    with pytest.raises(PluginError, match=r"^a\.md would load from another server"):
        HOOKS.on_post_page(own + tag, page, None)
