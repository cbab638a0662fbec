"""Try every class of all families, each in a process of its own: ``python -m tests.architectures.sweep``."""

import argparse
import multiprocessing
import sys
from pathlib import Path

import torch
import transformers

from tests.architectures.families import FAMILIES, classes_of
from tests.architectures.sweeps import Sweep
from tests.architectures.table import page
from tests.architectures.trial import Outcome, Row, failure, try_class

TIMEOUT_S = 180
BUGS = frozenset({"WRONG", "CRASH", "differs", "timeout"})


def row_in_process(name, timeout_s=TIMEOUT_S):
    """Return the row of a class, tried in a forked process whose end, however it comes, is an outcome too."""
    context = multiprocessing.get_context("fork")  # transformers is imported once
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(name, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(timeout_s) else Row(name, Outcome("timeout", f"no answer in {timeout_s} s"))
    except EOFError:
        process.join()
        return Row(name, Outcome("CRASH", f"the process ended with {process.exitcode}"))
    finally:
        process.kill()
        process.join()


def _send(name, pipe):
    try:
        pipe.send(try_class(name))
    except Exception as error:  # of the trial itself
        pipe.send(Row(name, failure("CRASH", error)))


def rows_of(names):
    """Try classes one after the other and say on stderr how far it is."""
    for number, name in enumerate(names, 1):
        row = row_in_process(name)
        words = " ".join(f"{key}={outcome.word}" for key, outcome in row.outcomes().items() if outcome)
        print(f"[{number}/{len(names)}] {name}: {words}", file=sys.stderr, flush=True)
        yield row


def swept(families):
    """Return the sweep over classes by family, each tried once."""
    rows = {row.name: row for row in rows_of(sorted({name for names in families.values() for name in names}))}
    found = {family: [rows[name] for name in names] for family, names in families.items()}
    return Sweep(torch.__version__, transformers.__version__, found)


def main(arguments=None):
    """Run the command and return how many outcomes are bugs, at most 255."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=FAMILIES)
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="try these classes")
    parser.add_argument("--output", type=Path, help="write the page here, not to stdout")
    parser.add_argument("--json", type=Path, help="write the rows, with tracebacks")
    parser.add_argument("--rows", type=Path, metavar="JSON", help="try nothing: take the rows that --json wrote")
    parser.add_argument("--beside", type=Path, metavar="JSON", help="say too what is other in rows of another version")
    options = parser.parse_args(arguments)
    chosen = {"chosen": options.only} if options.only else {family: classes_of(family) for family in options.family}
    sweep = Sweep.read(options.rows) if options.rows else swept(chosen)
    text = page(sweep, beside=options.beside and Sweep.read(options.beside))
    if options.json:
        sweep.write(options.json)
    if options.output:
        options.output.write_text(text)
    else:
        print(text)
    return min(255, sum(o.word in BUGS for row in sweep.rows() for o in row.outcomes().values() if o))


if __name__ == "__main__":
    sys.exit(main())
