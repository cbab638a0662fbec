"""Where output goes: reports to stdout, progress to a terminal's stderr and only when it takes long."""

import io
import sys
import time

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


def test_a_terminal_gets_colour_and_a_pipe_does_not(monkeypatch):
    from rich.text import Text

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, coloured in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stdout", stream)
        output.show(Text("frees", style="bold green"), {}, format="text", output=None)
        assert ("\x1b[" in stream.getvalue(), "frees" in stream.getvalue()) == (coloured, True)
