"""Every error that a user of memopt can meet; one class a kind, built from data, worded here."""

import difflib
from collections.abc import Iterable
from typing import Any, Literal


class MemoptError(ValueError):
    """The base of all of memopt's errors; `exit_code` is what the commands end with."""

    exit_code = 1

    def __reduce__(self) -> Any:
        """Come through another process, which would make an exception of its one text by a constructor that wants more."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[MemoptError], args: tuple[Any, ...], state: dict[str, Any]) -> MemoptError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RequestError(MemoptError):
    """What was asked for is wrong: a name, a value, a file."""

    exit_code = 2


class UnknownNameError(RequestError):
    """A name that is not one of the legal ones."""

    def __init__(self, kind: str, name: str, legal: Iterable[str]) -> None:
        legal = sorted(legal)
        close = difflib.get_close_matches(name, legal, n=3, cutoff=0.5)
        guess = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        super().__init__(f"no {kind} is called {name!r}; {guess}legal: {', '.join(legal)}")


class UnknownNamesError(RequestError):
    """Names in a list that are not of the legal ones, all of them."""

    def __init__(self, key: str, names: Iterable[str], legal: Iterable[str], *, also: str = "") -> None:
        names, legal = tuple(names), tuple(legal)
        matches = (difflib.get_close_matches(name, legal, n=1, cutoff=0.5) for name in names)
        close = dict.fromkeys(name for found in matches for name in found)
        guess = f"did you mean {' and '.join(map(repr, close))}? " if close else ""
        listed = ", ".join((*legal, *filter(None, (also,))))
        super().__init__(f"{key} does not know {', '.join(map(repr, names))}; {guess}legal: {listed}")


class UnknownModelError(UnknownNameError):
    """A MODEL argument that is nothing the commands know how to build."""

    def __init__(self, name: str, presets: Iterable[str]) -> None:
        super().__init__("model", name, presets)
        forms = "a config.json, a model directory, a hub id in the local cache, or package.module:factory"
        self.args = (f"{self}; or {forms}",)


class IllegalValueError(RequestError):
    """A value that its key does not take."""

    def __init__(self, key: str, value: object, legal: str) -> None:
        super().__init__(f"{key}={value!r} is not legal; legal: {legal}")


class UnreadableFileError(RequestError):
    """A file that cannot be read as what it should be."""

    def __init__(self, kind: str, path: object, why: str) -> None:
        super().__init__(f"{kind} {str(path)!r} cannot be read: {why}")


class UnwritableFileError(RequestError):
    """A file that cannot be written."""

    def __init__(self, kind: str, path: object, why: str) -> None:
        super().__init__(f"{kind} {str(path)!r} cannot be written: {why}")


class MissingPackageError(RequestError):
    """A package that only some reports need, and that is not installed."""

    def __init__(self, what: str, package: str, remedy: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install {package!r}, or {remedy}")


class IncompatibleError(RequestError):
    """Two settings that exclude each other; the sentences begin as those of the RFC."""


SWAP_AND_CHECKPOINT = "activation_swap='attention' is incompatible with activation checkpointing; drop one of the two"
"""What an IncompatibleError says of them, whether the configuration asks for both or the passes do."""


OFFLOAD_AND_SWAP = (
    "attention-swap is incompatible with fine-grained-offload and recompute-parts; drop it, and offload core_attn and "
    "attn_proj instead"
)
OFFLOAD_AND_CHECKPOINT = (
    "activation-checkpoint, which recomputes whole layers, is incompatible with fine-grained-offload and recompute-parts; "
    "drop one of them"
)
"""What an IncompatibleError says where passes ask for both."""


_OWN_CHECKPOINTING = (
    "incompatible with transformers' own gradient checkpointing; "
    "call model.gradient_checkpointing_disable() first, or leave gradient_checkpointing out of the TrainingArguments"
)
CHECKPOINT_TWICE = f"activation_checkpoint is {_OWN_CHECKPOINTING}"
PARTS_AND_CHECKPOINT = f"offload and recompute of parts of layers are {_OWN_CHECKPOINTING}"


class NoSelfAttentionError(MemoptError):
    """Attention swap found nothing to do."""

    def __init__(self, model_type: str) -> None:
        super().__init__(
            f"activation_swap='attention' found no self_attn modules in {model_type}; "
            "expected attention modules registered as self_attn"
        )


class NoLayerContainerError(MemoptError):
    """Activation checkpointing found no layers, or not where a registered class should have them."""

    def __init__(self, class_name: str, tried: Iterable[str] = ()) -> None:
        wrong = f"found no layers in {class_name}: it has no non-empty ModuleList or ModuleDict with numbers for keys"
        remedy = "keep its layers in an nn.ModuleList"
        if paths := ", ".join(tried):
            wrong = f"found no layers in {class_name} at any of its registered paths: {paths}"
            remedy = "add the path of this version to memopt.ir.layer_registry"
        super().__init__(f"activation_checkpoint {wrong}; {remedy}, or set activation_checkpoint to off")


class NothingToCheckpointError(MemoptError):
    """Activation checkpointing found layers, but nothing in them to recompute."""

    def __init__(
        self, class_name: str, *, num_layers: int, num_silent: int, num_checkpointed: int = 0, num_uncalled: int = 0
    ) -> None:
        silent = f"{num_silent} of its {num_layers} layers save nothing for backward"
        if num_uncalled:
            silent += (
                f", {num_uncalled} of them because no step calls them, or their forward is called without its hooks"
            )
        if num_checkpointed:
            silent += f", {num_checkpointed} of them because the model's own forward calls torch.utils.checkpoint there"
        others = ", and the others have no part that may run twice" if num_silent < num_layers else ""
        remedy = "train parameters in or below them" if num_silent else "name a part as memopt.ir.submodules knows it"
        if num_uncalled == num_layers:
            remedy = "have the model call layer(...), not layer.forward(...)"
        if num_checkpointed:
            remedy = "turn the model's own checkpointing off (model.gradient_checkpointing_disable())"
        super().__init__(
            f"activation_checkpoint found nothing to recompute in {class_name}: {silent}{others}; "
            f"{remedy}, or set activation_checkpoint to off"
        )


class NothingOfThatKindError(RequestError):
    """None of the parts that were asked for is in the model."""

    def __init__(
        self, what: str, class_name: str, asked: Iterable[str], has: Iterable[str], parts: Iterable[str] = ()
    ) -> None:
        has, parts = tuple(has), tuple(parts)
        found = "it found no layers in which anything is saved; try activation_offload of module:PATTERN"
        if has:
            found = f"it has: {', '.join(has)}"
        elif parts:
            found = (
                f"its layers have parts of other names: {', '.join(parts)}; move what one saves by activation_offload of "
                f"module:*.{parts[-1]}, or recompute whole layers by activation_checkpoint"
            )
        super().__init__(f"{what} found no {' or '.join(asked)} in {class_name}; {found}")


class UnmatchedPatternError(RequestError):
    """A pattern that matches no module in which something is saved."""

    def __init__(self, key: str, pattern: str, fqns: Iterable[str]) -> None:
        close = difflib.get_close_matches(pattern, list(fqns), n=2, cutoff=0.5)
        guess = f"did you mean {' or '.join(repr(f'module:{name}') for name in close)}? " if close else ""
        super().__init__(
            f"pattern {key!r} matches no module in which something is saved for backward; {guess}"
            "names are those of model.named_modules(), and * crosses dots"
        )


class InvalidPlanError(MemoptError):
    """A plan that contradicts itself or its graph."""


class PlanMismatchError(RequestError):
    """A plan that was made for another model."""


class VerificationError(MemoptError):
    """A rewritten model did not train as the original does."""


class TraceError(MemoptError):
    """The model could not be traced on fake tensors."""


class PredictionError(MemoptError):
    """The memory of a training step could not be foretold: something in it fails on fake tensors."""

    def __init__(self, class_name: str, error: Exception) -> None:
        why = str(error).strip().partition("\n")[0]
        super().__init__(
            f"a training step of {class_name} cannot be predicted: {type(error).__name__}: {why}; leave the prediction "
            "out (memopt-analyze --no-predict), or report it to memopt if the step trains on real tensors"
        )


class RewriteError(MemoptError):
    """The live model cannot be rewritten as asked; it was left as it was."""


class GraphCompileError(MemoptError, AssertionError):
    """A rewritten module was handed to a graph compiler, or what a graph compiler made to memopt.

    An AssertionError too: that is the one kind that dynamo passes on unchanged.
    """

    def __init__(
        self, fqn: str, *, state: Literal["rewritten", "waiting", "compiled"] = "rewritten", recomputes: bool = False
    ) -> None:
        flag = "enable_compile: true (activation-checkpoint:compiles=true)"
        if state == "rewritten":
            what = "is rewritten and runs eagerly only; take it out of torch.compile / export / jit, "
            what += (
                f"or call memopt.undo(model) first{f', or plan with {flag} and compile it then' if recomputes else ''}"
            )
        elif state == "waiting":
            what = "is rewritten in its first training forward, which must run eagerly; run that first, or give "
            what += f"memopt.apply the inputs{f'; and plan with {flag} to compile it then' if recomputes else ''}"
        else:
            what = "is compiled already; give memopt the model as it was before"
            what += f", plan with {flag}, and compile it after memopt.apply" if recomputes else ""
        super().__init__(f"{fqn!r} {what}")


class GraphCaptureError(MemoptError, RuntimeError):
    """A CUDA graph was to be captured of what needs host memory first."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(
            f"{num_bytes} bytes of pinned host memory would have to be allocated within a capture; run some steps with the "
            "same shapes on a side stream before it, as torch.cuda.graph asks for, and set max_inflight"
        )


class SavedTensorModifiedError(MemoptError, RuntimeError):
    """A tensor was written to in place before backward needed it; torch's own check is off under hooks."""

    def __init__(
        self, fqn: str, shape: tuple[int, ...], saved_version: int, version: int, *, what: str = "saved in"
    ) -> None:
        super().__init__(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(shape)}, {what} {fqn!r}, is at version {version}; expected version {saved_version}"
        )


class ReplayError(MemoptError, RuntimeError):
    """A checkpointed region did something else in its replay than in its forward."""

    def __init__(self, fqn: str, what: str) -> None:
        super().__init__(
            f"the replay of {fqn!r} {what}; its forward depends on something that changes and that memopt does not put back "
            "(an iterator, a cache, an array, an object): take the module out of the plan, or see Limits in the README"
        )


class BackwardInsideError(MemoptError, RuntimeError):
    """A backward inside of a checkpointed region's forward that a replay cannot do again."""

    def __init__(self, fqn: str, what: str) -> None:
        super().__init__(
            f"the forward of {fqn!r} runs a backward inside of it, which {what}, or take the module out of the plan"
        )
