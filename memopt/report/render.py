"""Renderables as text, SVG and HTML that are the same on every machine."""

import io
import re

from rich.console import Console, RenderableType

WIDTH = 100


def rendered(renderable: RenderableType, *, width: int = WIDTH, encoding: str = "utf-8") -> str:
    """Return plain text without colour, whatever the terminal and its environment.

    Lines are drawn in ASCII where an encoding is not Unicode, and characters that it lacks are question marks.
    """
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", newline="\n")
    Console(file=file, width=width, color_system=None, highlight=False, _environ={}).print(renderable)
    file.seek(0)
    return "\n".join(line.rstrip() for line in file.read().splitlines()) + "\n"


def rendered_svg(renderable: RenderableType, *, title: str, width: int = WIDTH) -> str:
    """Return one self-contained SVG picture in colour: rich's fonts from the net are left out."""
    svg = _recorded(renderable, width).export_svg(title=title, unique_id="memopt")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def rendered_html(renderable: RenderableType, *, picture: str = "", width: int = WIDTH) -> str:
    """Return one self-contained HTML page in colour, a picture that is HTML itself above the text."""
    html = _recorded(renderable, width).export_html(inline_styles=True)
    return html.replace("<body>", f"<body>\n{picture}", 1) if picture else html


def _recorded(renderable: RenderableType, width: int) -> Console:
    console = Console(
        file=io.StringIO(),
        record=True,
        width=width,
        color_system="truecolor",
        force_terminal=True,
        highlight=False,
        _environ={},
    )
    console.print(renderable)
    return console
