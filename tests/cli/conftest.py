"""Run the commands in this process, as a shell would see them."""

import pytest

from memopt.cli import analyze, apply
from memopt.cli.run import run

APPS = {"memopt-analyze": analyze.app, "memopt-apply": apply.app}


@pytest.fixture
def command(capfd):
    """Return a function that runs a command line and returns (exit code, stdout, stderr)."""

    def call(name, *arguments):
        code = run(APPS[name], [str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def fails(command):
    """Return a function that runs a wrong command line and returns (exit code, the one line on stderr)."""

    def call(name, *arguments):
        code, out, err = command(name, *arguments)
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        return code, line.removeprefix("error: ")

    return call
