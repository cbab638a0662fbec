"""What the two commands' apps have in common."""

from cyclopts import App

import memopt
from memopt.presets import PRESETS

EXIT_CODES = "Exit codes: 0 fine; 1 the work failed; 2 a wrong request. Errors are one line on stderr."


def make_app(name: str, examples: str) -> App:
    """Return an app whose help ends with examples, the presets and the exit codes."""
    epilogue = f"Examples:\n\n{examples}\n\nPresets: {', '.join(PRESETS)}.\n\n{EXIT_CODES}"
    return App(
        name=name,
        version=memopt.__version__,
        help_format="markdown",
        help_epilogue=epilogue,
        suppress_keyboard_interrupt=False,
    )
