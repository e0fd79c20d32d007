"""`qnmixer.export` by the code that its command runs, on an untrained network."""

from pathlib import Path

from qnmixer.export import check, export
from qnmixer.settings.compose import quoted

from ..saved import TINY, run, save


def refusal(*arguments: str) -> str:
    code, stdout, stderr = run(export, check, "export", *arguments)
    assert (code, stdout) == (1, "")
    (line,) = stderr.splitlines()
    return line.removeprefix("error: ")


def test_weights_and_card_beside_each_other(tmp_path: Path) -> None:
    folder, output = save(tmp_path / "run", *TINY), tmp_path / "to [bold]" / "my.safetensors"
    given = [f"run={folder}", f"output={quoted(output)}"]
    code, stdout, stderr = run(export, check, "export", *given)
    assert (code, stderr) == (0, "")
    assert f"card: {output.with_suffix('.md')}" in stdout.splitlines()
    assert sorted(path.name for path in output.parent.iterdir()) == ["my.md", "my.safetensors"]
    text = output.with_suffix(".md").read_text()
    assert "| best, after 3 of unknown steps |" in text
    assert str(tmp_path) not in text

    before = output.read_bytes()
    assert f"{output} exists already and is not overwritten" in refusal(*given)
    assert output.read_bytes() == before
    notes = tmp_path / "notes.md"  # the place of the card
    notes.write_text("mine")
    assert f"{notes} exists already" in refusal(given[0], f"output={notes.with_suffix('.safetensors')}")
    assert notes.read_text() == "mine"


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    output = f"output={tmp_path}/my.safetensors"
    assert "run=pretrained is a weights file already" in refusal("run=pretrained", output)
    sizes = [word for word in TINY if not word.startswith("model.")]
    folder = save(tmp_path / "run", *sizes, "model=fbp")
    assert "model=fbp, which has no weights" in refusal(f"run={folder}", output)
    path = (folder / "checkpoints" / "best.ckpt").rename(tmp_path / "best.ckpt")
    assert f"{path} lies in no run folder" in refusal(f"run={path}", output)
