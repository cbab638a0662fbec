"""Run a command: every error becomes one line on stderr and an exit code."""

import io
import os
import sys
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnusedCliTokensError

from memopt.errors import MemoptError

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def run(app: App, arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 fine, 1 the work failed, 2 a wrong request."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    if not debug:
        _silence_libraries()
    _never_fail_to_encode()
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except (CycloptsError, MemoptError) as error:
        if debug:
            raise
        print(f"error: {_one_line(_sentence(error))}", file=sys.stderr)
        return error.exit_code if isinstance(error, MemoptError) else USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if debug:
            raise
        print(f"error: {type(error).__name__}: {_one_line(str(error))} (--debug shows where)", file=sys.stderr)
        return 1
    return 0


def _sentence(error: Exception) -> str:
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"there is one MODEL; {error.unused_tokens[0]!r} is one too many, or a value whose flag is missing"
    return str(error)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _silence_libraries() -> None:
    """Keep stderr for our own line: torch and transformers warn about what the user did not choose."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _never_fail_to_encode() -> None:
    """Let stdout print what its encoding lacks as question marks; reports avoid the need where they can."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
