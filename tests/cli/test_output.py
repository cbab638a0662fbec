"""Where output goes: reports to stdout, progress to a terminal's stderr and only when it takes long."""

import io
import os
import re
import subprocess
import sys
import time

import pytest
from rich.console import Group
from rich.rule import Rule
from rich.table import Table

from memopt.cli import output


class Terminal(io.StringIO):
    def isatty(self):
        return True


def progress_on(stream, monkeypatch, *, seconds):
    """Return what two steps of work, so many seconds each, show on stderr."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", stream)
    with output.progress("Tracing something") as say:
        time.sleep(seconds)
        say("Training something")
        time.sleep(seconds)
    return stream.getvalue()


def test_long_work_shows_what_it_is_on_a_terminal(monkeypatch):
    shown = progress_on(Terminal(), monkeypatch, seconds=0.3)
    assert "Tracing something" in shown
    assert "Training something" in shown


def test_short_work_shows_nothing(monkeypatch):
    assert "something" not in progress_on(Terminal(), monkeypatch, seconds=0)


def test_a_pipe_sees_no_progress(monkeypatch):
    assert progress_on(io.StringIO(), monkeypatch, seconds=0.1) == ""


def wide_table():
    table = Table()
    for number in range(8):
        table.add_column(f"column {number}", no_wrap=True)
    return table


def test_a_narrow_terminal_loses_no_column(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for columns, width in (("60", 100), ("140", 140)):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr(sys, "stdout", Terminal())
        output.show(Group(wide_table(), Rule()), {}, format="text", output=None)
        shown = re.sub(r"\x1b\[[\d;]*m", "", sys.stdout.getvalue())
        assert "column 7" in shown
        assert max(map(len, shown.splitlines())) == width


@pytest.mark.parametrize(
    ("format", "part"), [("text", "+---"), ("json", '"\\u2500"'), ("svg", "&#9472;"), ("html", "&#9472;")]
)
def test_an_ascii_stdout_gets_ascii(monkeypatch, format, part):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.show(Group(wide_table(), Rule()), {"line": "\u2500"}, format=format, output=None)
    sys.stdout.flush()
    assert part in raw.getvalue().decode("ascii").replace(" ", "")


def test_the_command_prints_to_an_ascii_stdout():
    asked = ["tiny-llama", "--num-layers", "1", "--no-predict"]
    script = f"import sys; from memopt.cli.analyze import main; sys.argv[1:] = {asked}; main()"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environ, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"saved by" in done.stdout


def test_a_terminal_gets_colour_and_a_pipe_does_not(monkeypatch):
    from rich.text import Text

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, coloured in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stdout", stream)
        output.show(Text("frees", style="bold green"), {}, format="text", output=None)
        assert ("\x1b[" in stream.getvalue(), "frees" in stream.getvalue()) == (coloured, True)
