"""Where in a training step a moment stands, in words."""

import re

from memopt.ir import Moment, Phase

_LOSS_OPS = re.compile(r"log_?softmax|nll_?loss|cross_?entropy", re.IGNORECASE)
_LOSS_MODULES = re.compile(r"|loss\w*|criterion")
"""By their last names; the models of transformers compute it in their own forward, which has none."""
_HEADS = ("lm_head", "embed_out")


def place_text(moment: Moment) -> str:
    """Return phase, module and operator of a moment, e.g. ``backward of the loss (LogSoftmaxBackward0)``."""
    node, _, operator = moment.op.rpartition(" ")
    if moment.phase is Phase.OPTIMIZER:
        return f"the optimizer's step ({operator})"
    where = _where(moment)
    if moment.phase is Phase.FORWARD:
        return f"forward of {where} ({operator})"
    if not node:
        return f"backward, where {where} runs again ({operator})"
    if "AccumulateGrad" in node:
        return f"backward, where a parameter gets its gradient ({operator})"
    return f"backward of {where} ({node})"


def is_loss(moment: Moment) -> bool:
    """Tell whether the loss is computed from the logits, or the gradient of the logits from the loss."""
    return bool(_LOSS_MODULES.fullmatch(_last_name(moment)) and _LOSS_OPS.search(moment.op))


def is_logits(moment: Moment) -> bool:
    """Tell whether the logits are computed, or used."""
    return is_loss(moment) or _last_name(moment) in _HEADS


def is_beyond_logits(moment: Moment) -> bool:
    """Tell for sure that a moment has nothing to do with the logits: it stands in another module, or in the optimizer."""
    if moment.phase is Phase.OPTIMIZER:
        return True
    return bool(moment.module) and not is_logits(moment) and not _LOSS_MODULES.fullmatch(_last_name(moment))


def _where(moment: Moment) -> str:
    return "the loss" if is_loss(moment) else moment.module or "the model's own forward"


def _last_name(moment: Moment) -> str:
    return moment.module.rpartition(".")[2]
