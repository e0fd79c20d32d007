from pathlib import Path

import pytest

from qnmixer.runs.records import is_signed, own_modules, signed, signed_modules, write_results


def test_a_key_is_made_once_and_again_if_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    record = signed(["seed=1"])
    assert is_signed(record)
    assert not is_signed(record | {"overrides": ["seed=2"]})
    assert not is_signed({"signature": signed([])["signature"]})  # whose overrides are elsewhere
    assert {path.name for path in (tmp_path / "qnmixer").iterdir()} == {"key", "key.lock"}
    (tmp_path / "qnmixer" / "key").write_bytes(b"")
    assert not is_signed(record)
    assert is_signed(signed(["seed=1"]))


def test_without_a_place_for_a_key_no_run_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    record = signed([])
    assert record["signature"] is None
    assert not is_signed(record)


def test_only_a_run_of_this_user_may_import_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "mine"))
    record = signed(["a", "b"]) | signed_modules(["my_file"])
    for found, expected in (
        (record, ["my_file"]),
        (record | {"modules": ["my_file", "other"]}, []),  # a module that the run has not imported
        (record | {"modules": record["overrides"], "signature_of_modules": record["signature"]}, []),
        ({"modules": ["my_file"], "signature_of_modules": None}, []),
        ({}, []),
    ):
        write_results(tmp_path, found)
        assert own_modules(tmp_path) == expected
    write_results(tmp_path, record)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of_another"))
    assert own_modules(tmp_path) == []
