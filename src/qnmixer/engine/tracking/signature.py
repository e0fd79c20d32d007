"""The sign in results.json that this user has started a run with these overrides, and nobody else.

It is a digest by a key that only this user can read. A run folder of somebody else has none that fits.
"""

import hmac
import json
import os
import secrets
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from qnmixer.files import make_own_folder, private_files

_LENGTH = 32


def signed(overrides: list[str]) -> dict[str, Any]:
    """The entries of results.json for overrides that the user has given or accepted."""
    return {"overrides": overrides, "signature": _signature(overrides)}


def is_signed(record: dict[str, Any]) -> bool:
    """Whether this user has given the overrides of a results.json."""
    if "overrides" not in record:  # others could take them from another file
        return False
    ours = _signature(record["overrides"])
    return ours is not None and record.get("signature") == ours


def _signature(overrides: list[str]) -> str | None:
    """The digest; None if there is no place for a key."""
    try:
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"  # a cache may be deleted
        path = Path(home) / "qnmixer" / "key"
        make_own_folder(path.parent)
        if not path.exists() or path.stat().st_size != _LENGTH:
            path.unlink(missing_ok=True)
            _write_key(path)
        return hmac.digest(path.read_bytes(), json.dumps(overrides).encode(), "sha256").hex()
    except (OSError, RuntimeError):  # a disk that cannot be written, or no home
        return None


def _write_key(path: Path) -> None:
    """Write a new key. It is complete before it has its name, and one that another process wrote meanwhile stays."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with private_files():
            temporary.write_bytes(secrets.token_bytes(_LENGTH))
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:  # the disk may be full, or have no hard links
        temporary.unlink(missing_ok=True)
