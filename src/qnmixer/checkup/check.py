"""One line of the checklist."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["PASS", "FAIL", "SKIP"]


@dataclass(frozen=True)
class Check:
    """One line of the checklist; `mend` says what to do about a FAIL, and is empty otherwise."""

    name: str
    status: Status
    found: str
    mend: str = ""

    def line(self) -> str:
        """As the table has it."""
        return f"{self.status}  {self.name:<15}{self.found}{self.mend and '. Mend: '}{self.mend}"
