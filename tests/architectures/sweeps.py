"""What came of one sweep, as a value that a file keeps."""

import json
from dataclasses import asdict, dataclass

from tests.architectures.trial import Outcome, Row


@dataclass(frozen=True, slots=True)
class Sweep:
    """The rows of one sweep by family, and with what it was made."""

    torch: str
    transformers: str
    families: dict[str, list[Row]]

    def rows(self):
        """Return every row once, sorted by name."""
        rows = {row.name: row for family in self.families.values() for row in family}
        return [rows[name] for name in sorted(rows)]

    def write(self, path):
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path):
        kept = json.loads(path.read_text())
        families = {family: [_row(**row) for row in rows] for family, rows in kept["families"].items()}
        return cls(kept["torch"], kept["transformers"], families)


def _row(*, plain, trace, modes, **others):
    found = {mode: Outcome(**outcome) for mode, outcome in modes.items()}
    return Row(plain=Outcome(**plain), trace=trace and Outcome(**trace), modes=found, **others)
