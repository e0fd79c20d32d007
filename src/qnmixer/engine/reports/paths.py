"""Texts without the folders of their paths, to share."""

import re

# A path that starts at a root or a home folder. Its last name is shown, unless that is a user's home.
_NAME = r"[^\s/\\'\",;:<>]+"
_FOLDERS = re.compile(
    rf"(?<![\w.…<])(?:[A-Za-z]:)?(?:[/\\](?:home|Users)[/\\]{_NAME}[/\\]?|~[\w.-]*[/\\]|[/\\]{_NAME}[/\\]|[A-Za-z]:\\)"
    rf"(?:{_NAME}[/\\])*"
)


def without_folders(text: str) -> str:
    """Replace the folders of absolute paths in a text by …, so that it names neither the machine nor the user."""
    return _FOLDERS.sub("…/", text)
