"""Files beside the code, for those who start from it, agree with the code."""

import json
import re
import subprocess
import sys
import tomllib

import yaml

from .pages import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_command_is_a_line_of_python_m_qnmixer() -> None:
    code = "import runpy, sys\nrunpy.run_module('qnmixer', run_name='__main__')\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    scripts = PYPROJECT["project"]["scripts"].values()
    assert {line.split()[2] for line in lines} == {entry.partition(":")[0] for entry in scripts}
    assert all(len(line.split()) > 6 for line in lines)


def test_the_workflow_and_a_commit_do_what_ci_and_lint_do_on_every_python_that_make_takes() -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    steps = [step["run"] for step in job["steps"] if "run" in step]
    assert steps[-1] == ".ci/run"
    assert all(step.startswith("git config") for step in steps[:-1])  # nothing is checked that .ci/run does not
    first, after = re.findall(r"\(3, (\d+)\)", (ROOT / "Makefile").read_text())
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(int(first), int(after))]
    # And a commit is checked as by make lint.
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in repository["hooks"]]
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert entries == [command.removesuffix(" .") for command in commands]


def test_the_container_is_made_by_make() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^RUN (.*)", dockerfile, re.MULTILINE) == ["make install TORCH=$TORCH"]
    described = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    build = described["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert re.search(rf"^FROM \S+ AS {build['target']}$", dockerfile, re.MULTILINE)
    assert described["postCreateCommand"] == "make install"


def test_a_key_of_wandb_gets_into_neither_git_nor_the_container() -> None:
    assert "WANDB_API_KEY=\n" in (ROOT / ".env.example").read_text()
    assert ".env" in (ROOT / ".dockerignore").read_text().splitlines()
    ignored = subprocess.run(["git", "check-ignore", ".env", ".env.example"], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout.split() == [".env"]


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PYPROJECT["project"]["version"]
    assert f"\n## {citation['version']}\n" in (ROOT / "CHANGELOG.md").read_text()
    paper = citation["preferred-citation"]
    names = ", ".join(author["family-names"] for author in paper["authors"])
    readme = (ROOT / "README.md").read_text()
    assert f"({names}, CVPR {paper['year']})" in readme
    assert paper["url"] in readme
    assert paper["url"] == PYPROJECT["project"]["urls"]["Paper"]


def test_the_map_of_rooms_is_that_of_the_import_contracts() -> None:
    contracts = {it["name"]: it for it in PYPROJECT["tool"]["importlinter"]["contracts"]}
    text = (ROOT / "CONTRIBUTING.md").read_text()

    mapped = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text.split("## The map")[1], re.MULTILINE)))
    floors = contracts["Rooms import from lower floors only"]["layers"]
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor.split(" | ")}
    assert sorted(mapped) == sorted(floor_of)
    assert mapped == sorted(mapped, key=floor_of.__getitem__)  # from the top floor down


def test_a_change_needs_at_most_four_files_to_be_read_and_all_that_are_named_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Where a change is made")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!change |-)(.*) \| (.*) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 8
    for change, *cells in rows:
        read, changed = (re.findall(r"`([\w/]+\.\w+)`", cell) for cell in cells)
        assert 0 < len(read) <= 4, change
        for path in (path for path in read + changed if "NAME" not in path):
            assert (ROOT / path if path.startswith("conf/") else ROOT / "src" / "qnmixer" / path).is_file(), path
