"""README and docs: short, no broken link, figures by commands. `promises/test_documents.py` runs their commands."""

import re
from pathlib import Path

import pytest

from qnmixer.memory.plan import Planner
from qnmixer.memory.report import LEVERS, levers_table
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse

from .pages import PAGES, README, ROOT, blocks, commands
from .schemas import EXTRAS


def test_the_readme_is_for_someone_in_a_hurry_and_links_every_page() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 140
    assert [page.name for page in PAGES[1:] if f"](docs/{page.name})" not in text] == []


def test_each_command_stands_once_and_what_is_not_run_is_not_of_this_repository() -> None:
    found = commands()
    assert len(found) > 20
    assert len(found) == len(set(found))
    others = [line for page in PAGES for line in blocks(page, "")]
    assert [line for line in others if not line.startswith(("wandb ", "mkdir all && ", "hf "))] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    missing = [link for link in links if not (page.parent / link.split("#")[0]).exists()]
    if not EXTRAS:  # a copy without them
        missing = [link for link in missing if "/extras/" not in link and "/qnmixer_studies/" not in link]
    for link in links:
        path, _, heading = link.partition("#")
        if heading:
            titles = re.findall(r"^#+ (.*)", (page.parent / path).read_text(), re.MULTILINE)
            missing += [link] * (heading not in {re.sub(r"[^\w -]", "", it).lower().replace(" ", "-") for it in titles})
    named = re.findall(r"`((?:src|conf|tests|notebooks)/[\w/.]+)`", text)
    missing += [name for name in named if "NAME" not in name and not (ROOT / name).exists()]  # NAME: the reader's
    assert [name for name in missing if name != "conf/local/default.yaml"] == []  # a file of the user


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_was_measured_stands_in_tables_that_commands_write(page: Path) -> None:
    by_hand = re.sub(r"<!-- (\w+) -->.*?<!-- end of", "", page.read_text(), flags=re.DOTALL)
    rows = [line for line in by_hand.splitlines() if line.startswith("|")]
    assert [row for row in rows if re.search(r"\d (MiB|GiB|MB|GB|dB|s|ms|min|%)\b|\d %|±", row)] == []


def test_the_checks_that_the_docs_name_are_those_of_doctor() -> None:
    page = ROOT / "docs" / "devices.md"
    (table,) = re.findall(r"^\| question \|.*?\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    named = re.findall(r"`([\w ]+)`", table)
    source = "".join(path.read_text() for path in (ROOT / "src" / "qnmixer" / "commands" / "checkup").glob("*.py"))
    assert len(named) >= 10
    assert [name for name in named if f'"{name}"' not in source] == []


@pytest.mark.long
def test_the_table_of_levers_is_what_the_plan_says() -> None:
    """Its base and its first two lines: the rest comes from the same command."""
    block = re.search(r"<!-- levers -->\n(.*?)<!-- end of levers", (ROOT / "docs" / "memory.md").read_text(), re.DOTALL)
    assert block is not None
    planner = Planner(config := parse(compose("train", ["data.batch_size=4"])))
    first = dict(list(LEVERS.items())[:2])
    expected = levers_table(config, planner, first).splitlines()
    assert block[1].splitlines()[: len(expected)] == expected
