"""Write rows as the page docs/architectures.md."""

from collections import Counter

from tests.architectures.trial import EXACT, MEMORY, MODES

COLUMNS = ("plain", "trace", *MODES, MEMORY)
INTRODUCTION = """\
# Which architectures train as before

This page is written by `python -m tests.architectures.sweep --output docs/architectures.md`, with torch {torch} and
transformers {transformers}, on a CPU in float32. For its last section run it with `--json OTHER.json` where another
transformers is installed, and then here with `--beside OTHER.json`.

Each class is built tiny, by `tests/architectures/shrink.py` and the fields in `tests/architectures/fields.py`, trained with
the words (and what else it wants) of `tests/architectures/inputs.py`, without a cache, and tried in a process of its own;
models of images and of sound get an image or a sound too, as `tests/architectures/images.py` and `sounds.py` make them.
A class of two families is tried once and is in both tables; those with a state instead of attention, or beside it, are
a family too.

- *plain*: two training steps of the model as it is, and the same again. `exact` if they agree bit for bit.
- *trace*: `exact` if what the fake trace says of every saved tensor (owner, operation, shape, strides but those of one
  element, dtype, storage, bytes, parameter or not), of every call and of every expensive function is what a real run shows.
- *{modes}*: two steps of the model rewritten by a plan (attention swap, checkpointing,
  and offload of `core_attn`, `attn_proj`, `expert_fc1` with recompute of `layernorm`, `moe_act`). `exact` if the loss, all
  gradients and all buffers are those of the plain model, bit for bit, and something was moved or replayed.
- *memory*: `exact` if the peak memory that is predicted for a step of the plain model, and for one of the fully checkpointed
  model, is that of a real step, to the byte; `not compared` where the real step fails otherwise.
- *trained*: how many parameters of the class get a gradient that is not zero; of others nothing is shown.
- `refused` is an error of memopt with a reason, which is below the table; `none`, that a plan moves and replays nothing.
  `WRONG`, `CRASH`, `differs` and `timeout` are bugs.
"""


def page(sweep, *, beside=None):
    """Return the page of a sweep: totals, each family's classes, what is other in a sweep beside it, and reasons."""
    head = INTRODUCTION.format(torch=sweep.torch, transformers=sweep.transformers, modes="*, *".join(MODES))
    sections = [line for family, rows in sweep.families.items() for line in _section(family, rows)]
    reasons = ("## Reasons", *_reasons(sweep.rows()), "")
    others = () if beside is None else _beside(sweep, beside)
    return "\n".join((head, *_totals(sweep.rows()), "", *sections, *reasons, *others))


def _beside(sweep, other):
    """Return the totals of another sweep, its rows that this one lacks or has otherwise, and which it lacks."""
    known, found = ({row.name: row for row in each.rows()} for each in (sweep, other))
    new = [row for name, row in found.items() if name not in known]
    changed = [row for name, row in found.items() if name in known and _is_other(row, known[name])]
    yield from (f"## With transformers {other.transformers}", "", *_totals(other.rows()), "")
    for what, rows in (("new", new), ("otherwise than above", changed)):
        yield from (f"{len(rows)} classes are {what}{':' if rows else '.'}", "")
        if rows:
            yield from (*_table(rows), *_reasons(rows), "")
    gone = sorted(known.keys() - found.keys())
    yield from (f"{len(gone)} classes are gone{': ' if gone else ''}{', '.join(gone)}.", "")


def _is_other(row, known):
    """Tell whether a row has another word than a known one, in a column that both have."""
    one, other = row.outcomes(), known.outcomes()
    return any(
        (one[column] and one[column].word) != (other[column] and other[column].word) for column in one.keys() & other
    )


def _section(family, rows):
    return f"## {family}", "", *_totals(rows), "", *_table(sorted(rows, key=lambda row: row.name)), ""


def _totals(rows):
    counts = {column: Counter(o.word for row in rows if (o := row.outcomes().get(column))) for column in COLUMNS}
    words = sorted({word for count in counts.values() for word in count}, key=lambda word: (word != EXACT, word))
    yield f"| {len(rows)} classes | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for word in words:
        yield f"| {word} | {' | '.join(str(counts[column][word]) for column in COLUMNS)} |"


def _table(rows):
    yield f"| class | {' | '.join(COLUMNS)} | trained |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    for row in rows:
        outcomes = (row.outcomes().get(column) for column in COLUMNS)
        yield f"| {row.name} | {' | '.join(outcome.word if outcome else '' for outcome in outcomes)} | {row.trained} |"


def _reasons(rows):
    """Return what is said of outcomes, each reason with all that it holds for."""
    where = {}
    for row in rows:
        for column, outcome in row.outcomes().items():
            if outcome and outcome.why:
                reason = (outcome.word, outcome.why.replace(row.name, "CLASS"))
                where.setdefault(reason, []).append(f"{row.name} ({column})")
    for (word, why), found in sorted(where.items()):
        yield f"\n**{word}**: {why}\n\n: {', '.join(found)}"
