"""`python -m qnmixer`."""

import subprocess
import sys
import tomllib

from .test_starter import ROOT

CODE = """
import runpy, sys
runpy.run_module("qnmixer", run_name="__main__")
assert "torch" not in sys.modules
"""


def test_every_command_is_a_line() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert {line.split()[2] for line in lines} == {entry.partition(":")[0] for entry in scripts.values()}
    assert all(len(line.split()) > 6 for line in lines)
