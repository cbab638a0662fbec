"""Try one class: trace it, run it, rewrite it in every mode, and say what came of each."""

import functools
import logging
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from unittest import mock

import transformers

import memopt
from memopt.analyze.build import build_graph
from memopt.analyze.observe import observe
from memopt.analyze.roles import name_saves
from memopt.errors import MemoptError
from memopt.ir import policy
from memopt.passes import AttentionSwap
from memopt.runtime import finish_copies
from tests import zoo
from tests.architectures.inputs import batch, loss_of
from tests.architectures.memory import wrong_peaks
from tests.architectures.routing import BalancedRouting
from tests.architectures.shrink import class_named, tiny_model
from tests.runtime.offloads import PARADIGM

EXACT = "exact"
MODES = {
    "swap": {"passes": [AttentionSwap(margin_bytes=0)]},
    "full": {"activation_checkpoint": "full"},
    "selective": {"activation_checkpoint": "selective"},
    "fine-grained": PARADIGM,
}
MEMORY = "memory"
NUM_STEPS = 2
BALANCED = "with the choices of routers balanced in the real run too, as the trace takes them to be and says"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one trial: a word, why, and for who mends it the traceback."""

    word: str
    """exact, none (nothing to do), refused, differs, WRONG, CRASH, not runnable, not deterministic or timeout."""
    why: str = ""
    details: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One class: whether the plain model runs here, whether its trace equals a real run, and what each mode does."""

    name: str
    plain: Outcome
    trace: Outcome | None = None
    modes: dict[str, Outcome] = field(default_factory=dict)
    trained: str = ""
    """Of how many parameters the gradient is not zero: another one would hide its loss."""

    def outcomes(self):
        return {"plain": self.plain, "trace": self.trace, **self.modes}


def try_class(name):
    """Return the row of a class; whatever is raised is in it."""
    try:
        plain = tiny_model(class_named(name))
        inputs = batch(plain)
        want = [step(plain, inputs, seed) for seed in range(NUM_STEPS)]
        fresh = tiny_model(class_named(name))  # as what a step leaves in buffers changes the next one
        again = [step(fresh, inputs, seed) for seed in range(NUM_STEPS)]
    except Exception as error:
        return Row(name, failure("not runnable", error))
    if found := differing(want, again):
        return Row(name, Outcome("not deterministic", _listed(found)))
    try:
        graph = memopt.analyze(plain, inputs)
    except Exception as error:
        return Row(name, Outcome(EXACT), refusal(error))
    trace = _compared(tiny_model(class_named(name)), inputs, graph)
    modes = {mode: _tried(tiny_model(class_named(name)), inputs, want, graph, config) for mode, config in MODES.items()}
    modes[MEMORY] = _foretold(lambda: tiny_model(class_named(name)), graph)
    return Row(name, Outcome(EXACT), trace, modes, _trained(plain))


def step(model, inputs, seed, *, before_backward=lambda: None):
    """Return copies of the loss and every gradient and buffer after one step; `zoo.train_step` for any output."""
    model.zero_grad()
    transformers.set_seed(seed)
    loss = loss_of(model(**inputs))
    before_backward()
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach()} | gradients | {name: b.clone() for name, b in model.named_buffers()}


def differing(steps, others):
    """Return the names of what is not equal bit for bit in any of the steps."""
    return [name for one, other in zip(steps, others, strict=True) for name in zoo.differing(one, other)]


def failure(word, error):
    where = traceback.extract_tb(error.__traceback__)[-1]
    first = str(error).strip().partition("\n")[0]
    why = f"{type(error).__name__}: {first} ({where.filename.rpartition('site-packages/')[2]}:{where.lineno})"
    return Outcome(word, why, "".join(traceback.format_exception(error)))


def refusal(error):
    """Return an error of memopt as a refusal, whatever else is raised as a crash."""
    return (
        replace(failure("refused", error), why=str(error))
        if isinstance(error, MemoptError)
        else failure("CRASH", error)
    )


def _trained(model):
    grads = [p.grad for p in model.parameters()]
    return f"{sum(grad is not None and bool(grad.any()) for grad in grads)} of {len(grads)}"


def _compared(model, inputs, fake):
    """Return whether the fake trace lists what a real run saves, entry by entry."""
    assumes_balance = any("choose evenly" in note for note in fake.notes)
    transformers.set_seed(0)
    with BalancedRouting() if assumes_balance else nullcontext():
        seen = observe(model, (), inputs)
        name_saves(seen)
    real = build_graph(model, seen, name="real", trace_input=fake.input)
    calls, real_calls = [c.fqn for c in fake.calls], [c.fqn for c in real.calls]
    if calls != real_calls:
        return Outcome("differs", _first_difference("call", calls, real_calls))
    saved, real_saved = ([_with_strides_that_count(save) for save in graph.saved] for graph in (fake, real))
    if saved != real_saved:
        return Outcome("differs", _first_difference("save", saved, real_saved))
    if fake.held != real.held:
        return Outcome("differs", "the storages that inputs and outputs hold")
    uncounted = [tuple(replace(each, flops=0) for each in graph) for graph in (fake.calls, fake.functions)]
    if uncounted != [real.calls, real.functions]:
        return Outcome("differs", "what calls and functions take and return")
    return Outcome(EXACT, BALANCED if assumes_balance else "")


def _foretold(build, graph):
    """Return whether the peaks of training steps are those that are predicted."""
    try:
        wrong = wrong_peaks(build, graph)
    except Exception as error:
        return replace(failure("CRASH", error), word="refused" if isinstance(error, MemoptError) else "not compared")
    return Outcome("differs", wrong) if wrong else Outcome(EXACT)


def _with_strides_that_count(save):
    """Return a save without the strides of dimensions of one element, which kernels give as they like."""
    strides = (stride for size, stride in zip(save.shape, save.stride, strict=True) if size != 1)
    return replace(save, stride=tuple(strides))


def _first_difference(what, fakes, reals):
    for index, (fake, real) in enumerate(zip(fakes, reals, strict=False)):
        if fake != real:
            return f"{what} {index} of {len(fakes)} and {len(reals)}: {fake} traced, {real} real"
    return f"{len(fakes)} {what}s traced, {len(reals)} real"


def _tried(model, inputs, want, graph, config):
    try:
        with (
            mock.patch.object(policy, "MIN_SWAP_TENSOR_BYTES", 1),
            _warnings() as told,
        ):  # tiny models save tiny tensors
            handle = memopt.apply(model, memopt.plan(graph, **config))
            copied = functools.partial(finish_copies, model)  # so that whatever is swapped really leaves
            got = [step(model, inputs, seed, before_backward=copied) for seed in range(len(want))]
    except Exception as error:
        return refusal(error)
    if found := differing(want, got):
        return Outcome("WRONG", _listed(found))
    stats = handle.stats()
    worked = stats.copied_out_bytes or stats.replayed_calls
    return Outcome(EXACT) if worked else Outcome("none", ": ".join(("nothing was moved or replayed", *told)))


@contextmanager
def _warnings():
    """Yield a list that gets what memopt warns of, each once."""
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage()) if record.getMessage() not in told else None
    logger = logging.getLogger("memopt")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def _listed(names, most=4):
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
