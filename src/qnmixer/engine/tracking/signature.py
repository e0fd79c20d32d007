"""The sign in results.json that this user has started a run with these overrides, and nobody else.

It is a digest by a key that only this user can read. A run folder of somebody else has none that fits.
"""

import hmac
import json
import os
import secrets
from contextlib import suppress
from typing import Any

from qnmixer.files import default_cache_dir, make_own_folder

_LENGTH = 32


def signed(overrides: list[str]) -> dict[str, Any]:
    """The entries of results.json for overrides that the user has given or accepted."""
    return {"overrides": overrides, "signature": _signature(overrides)}


def is_signed(record: dict[str, Any]) -> bool:
    """Whether this user has given the overrides of a results.json."""
    ours = _signature(record.get("overrides", []))
    return ours is not None and record.get("signature") == ours


def _signature(overrides: list[str]) -> str | None:
    """The digest; None if there is no place for a key."""
    path = default_cache_dir() / "key" / "key"
    try:
        make_own_folder(path.parent)
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(_LENGTH))
        key = path.read_bytes()
    except (OSError, RuntimeError):  # a disk that cannot be written, or no home
        return None
    return hmac.digest(key, json.dumps(overrides).encode(), "sha256").hex() if len(key) == _LENGTH else None
