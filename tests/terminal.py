"""A command in a terminal of its own, and what is on its screen."""

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TOKEN = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


@dataclass
class Session:
    """How a command ended, and the screen after each of its outputs."""

    code: int
    screens: list[str]

    @property
    def text(self) -> str:
        """What is there at the end."""
        return self.screens[-1]


class Screen:
    """As much of a terminal as rich uses: lines, colours and cursors that it drops, the start of a line, a line up."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    def show(self, text: str) -> None:
        position = 0
        for token in _TOKEN.finditer(text):
            assert token.start() == position, f"unknown: {text[position : token.start()]!r}"
            position = token.end()
            self._do(token)
        assert position == len(text), f"unknown: {text[position:]!r}"

    def _do(self, token: re.Match[str]) -> None:
        match token[0]:
            case "\r":
                self.column = 0
            case "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
            case text if token[2] is None:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
                self.column += len(text)
            case "\x1b[2K":
                self.lines[self.row] = ""
            case "\x1b[1A":
                self.row -= 1
            case _:
                assert token[2] == "m" or token[0] in ("\x1b[?25l", "\x1b[?25h"), f"unknown: {token[0]!r}"


def in_terminal(
    command: Sequence[str],
    *,
    columns: int = 100,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    interrupt_at: str | None = None,
) -> Session:
    """Run a command in a terminal; Ctrl-C is typed when its screen shows the pattern `interrupt_at`."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(cwd or ".")
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        os.execvpe(command[0], command, environment | {"TERM": "xterm"} | dict(env or {}))
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    screen, screens, rest = Screen(), [""], b""
    while chunk := _read(descriptor):
        data = rest + chunk
        end = max(data.rfind(b"\x1b"), data.rfind(b"\n")) if _is_cut(data) else len(data)
        screen.show(data[:end].decode())
        rest = data[end:]
        screens.append("\n".join(line.rstrip() for line in screen.lines))
        if interrupt_at and re.search(interrupt_at, screens[-1]):
            os.write(descriptor, b"\x03")
            interrupt_at = None
    os.close(descriptor)
    return Session(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), screens)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 2**16)
    except OSError:  # its end, on Linux
        return b""


def _is_cut(data: bytes) -> bool:
    """Whether data ends inside of a letter or a control sequence."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return True
    return re.search(r"\x1b(\[[\d;?]*)?$", text) is not None
