"""The README shows what the command really prints."""

from pathlib import Path

from memopt.cli.analyze import app
from memopt.cli.run import run

README = Path(__file__).parent.parent / "README.md"


def test_the_report_is_the_real_one(capfd):
    assert run(app, ["qwen3-30b-a3b", "--swap", "attention"]) == 0
    assert f"```text\n{capfd.readouterr().out}```" in README.read_text()
