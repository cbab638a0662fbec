"""Try every class of all families, each in a process of its own: ``python -m tests.architectures.sweep``."""

import argparse
import json
import multiprocessing
import sys
from dataclasses import asdict
from pathlib import Path

from transformers.models.auto import modeling_auto

from tests.architectures.table import page
from tests.architectures.trial import Outcome, Row, failure, try_class

FAMILIES = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq-to-seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""Name of a family -> the table of transformers that registers its classes."""
TIMEOUT_S = 180
BUGS = frozenset({"WRONG", "CRASH", "differs", "timeout"})


def classes_of(family):
    """Return the names of a family's classes, sorted, each once."""
    return sorted(set(getattr(modeling_auto, FAMILIES[family]).values()))


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


def main(arguments=None):
    """Run the command and return how many outcomes are bugs, at most 255."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=list(FAMILIES))
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="try these classes")
    parser.add_argument("--output", type=Path, help="write the page here, not to stdout")
    parser.add_argument("--json", type=Path, help="write the rows, with tracebacks")
    options = parser.parse_args(arguments)
    chosen = {"chosen": options.only} if options.only else {family: classes_of(family) for family in options.family}
    rows = {row.name: row for row in rows_of(sorted({name for names in chosen.values() for name in names}))}
    text = page({family: [rows[name] for name in names] for family, names in chosen.items()})
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1))
    if options.output:
        options.output.write_text(text)
    else:
        print(text)
    return min(255, sum(o.word in BUGS for row in rows.values() for o in row.outcomes().values() if o))


if __name__ == "__main__":
    sys.exit(main())
