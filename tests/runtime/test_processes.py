"""Forks, and the end of the interpreter."""

import subprocess
import sys
import textwrap


def run(script):
    """Run a script in an interpreter of its own; return (exit code, everything it printed)."""
    prelude = """
        import os, torch, memopt
        torch.set_num_threads(1)
        from tests import models
        from tests.runtime.steps import SWAP, step
        model, inputs = models.SharedAttention(), models.hidden()
        handle = memopt.apply(model, SWAP, inputs)
    """
    text = textwrap.dedent(prelude) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_forked_child_trains_with_engines_of_its_own():
    code, printed = run("""
        loss, _ = step(model, inputs)
        child = os.fork()
        if not child:
            again, _ = step(model, inputs)
            os._exit(0 if torch.equal(loss, again) else 1)
        print(os.waitpid(child, 0)[1])
    """)
    assert (code, printed) == (0, "0\n")


def test_the_interpreter_ends_quietly_with_copies_under_way():
    """A thread that copies while torch is taken apart would abort the process."""
    script = """
        wide = memopt.swap_wrapper(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()))
        losses = [model(inputs) for _ in range(4)] + [wide(torch.randn(20_000, 512)).sum() for _ in range(2)]
    """
    assert run(script) == (0, "")


def test_it_ends_quietly_in_the_middle_of_an_error():
    code, printed = run("loss = model(inputs); loss.backward(); 1 / 0")
    assert code == 1
    assert printed.strip().endswith("ZeroDivisionError: division by zero")
    assert "memopt" not in printed.partition("ZeroDivisionError")[2]
