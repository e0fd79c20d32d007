import pytest

from qnmixer.engine.tracking.loggers import without_folders


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("root: /home/anna/scans/mayo", "root: …/mayo"),
        ("data.root=/data/ct/a.dcm, x", "data.root=…/a.dcm, x"),
        ("['data.root=/mnt/ct/mayo']", "['data.root=…/mayo']"),
        ("/home/anna", "…/"),
        ("~anna/ct/mayo", "…/mayo"),
        ("C:\\Users\\anna\\ct\\mayo", "…/mayo"),
        ("file:///home/anna/mayo", "file://…/mayo"),
        ("34.13 dB / 91.9", "34.13 dB / 91.9"),
        ("and/or/not a/b/c.dcm 1/2", "and/or/not a/b/c.dcm 1/2"),
        ("</script><b>", "</script><b>"),
    ],
)
def test_paths_lose_their_folders(text: str, shown: str) -> None:
    assert without_folders(text) == shown
