"""Reports out: stdout or a file, as text, JSON, SVG or HTML. Progress goes to stderr, and to terminals only."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from memopt.errors import UnwritableFileError
from memopt.ir import Memory
from memopt.report import WIDTH, rendered, rendered_html, rendered_svg, timeline_html

SILENT_SECONDS = 1.0
"""Work that is done sooner shows no progress."""


def show(
    renderable: RenderableType,
    values: Mapping[str, Any],
    *,
    format: str,
    output: Path | None,
    title: str = "memopt",
    memory: Memory | None = None,
) -> None:
    """Write a report in one format, as HTML with a picture of a predicted step.

    Colour and a wide terminal's own width are only for text on a terminal.
    """
    if format == "text" and output is None and sys.stdout.isatty():
        console = Console(highlight=False)
        console.width = max(console.width, WIDTH)  # narrower, rich drops columns; the terminal wraps the lines
        console.print(renderable)
        return
    encoding = "utf-8" if output else sys.stdout.encoding or "utf-8"
    formats: dict[str, Callable[[], str]] = {
        "text": lambda: rendered(renderable, encoding=encoding),
        "json": lambda: json.dumps(values, indent=2) + "\n",
        "svg": lambda: _markup(rendered_svg(renderable, title=title), encoding),
        "html": lambda: _markup(rendered_html(renderable, picture=_picture(memory, title)), encoding),
    }
    write(formats[format](), output)


def _picture(memory: Memory | None, title: str) -> str:
    return timeline_html(memory, title=f"{title}: memory of a training step, predicted") if memory else ""


def _markup(text: str, encoding: str) -> str:
    """Return SVG or HTML with references for the characters that an encoding lacks."""
    return text.encode(encoding, "xmlcharrefreplace").decode(encoding)


def write(text: str, output: Path | None) -> None:
    """Write text to a file, or to stdout; raises UnwritableFileError."""
    if output is None:
        sys.stdout.write(text)
        return
    with writing("output", output):
        output.write_text(text, encoding="utf-8")


@contextmanager
def writing(kind: str, path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into an UnwritableFileError."""
    try:
        yield
    except OSError as error:
        raise UnwritableFileError(kind, path, error.strerror or str(error)) from None


@contextmanager
def progress(doing: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being done once it takes longer than a second; yields how to say what is next."""
    if not sys.stderr.isatty():
        yield lambda doing: None
        return
    status = Console(stderr=True).status(doing)
    timer = threading.Timer(SILENT_SECONDS, status.start)
    timer.start()
    try:
        yield status.update
    finally:
        timer.cancel()
        timer.join()
        status.stop()
