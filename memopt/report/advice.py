"""What stands in the way of a smaller peak, and what would help: sentences, each only where its numbers say so."""

from collections.abc import Callable, Iterator
from math import floor

from memopt.ir import OFFLOAD, Action, Memory, Phase, Plan, Use, account
from memopt.report.memory import ms_text
from memopt.report.places import is_beyond_logits, is_logits, place_text
from memopt.units import GIB, format_bytes

MOST = 0.6
"""Of the peak: what is no activation and takes more than this is most of it."""
FEW = 0.15
"""Of the peak: activations below this are few."""
REACHES = 0.75
"""Of what the plan frees: a peak that falls by more is reached by it."""
TIGHT = 0.13
"""Of the peak: what fits by less may not fit."""
MUCH_HOST_BYTES = 32 * GIB
"""A host with eight devices often has less than eight times this much for them."""


def advice_of(plan: Plan, memory: Memory) -> tuple[str, ...]:
    """Return the sentences that hold for a plan and its prediction, what it does not know first."""
    return memory.notes + tuple(sentence for part in _PARTS if (sentence := part(plan, memory)))


def fixed_sentence(plan: Plan, memory: Memory) -> str:
    """Return that parameters, gradients and optimizer state are most of the peak, or do not fit by themselves."""
    fixed, peak = _fixed_bytes(memory), memory.step.peak.total_bytes
    alone = memory.short_bytes(fixed)
    if fixed < MOST * peak and not alone:
        return ""
    short = f" They alone are short by {format_bytes(alone)}." if alone else ""
    return (
        f"Parameters, gradients and optimizer state take {format_bytes(fixed)} when all of them are there: no plan of "
        f"activations brings the peak of {format_bytes(peak)} below that.{short} What lowers that: "
        f"{'; '.join(_fixed_remedies(memory))}."
    )


def few_activations_sentence(plan: Plan, memory: Memory) -> str:
    """Return that a plan can free little, because there is little to free."""
    step, given = memory.baseline, plan.graph.input
    activations, peak = step.most_for(Use.ACTIVATIONS), step.peak.total_bytes
    if not plan.decisions or activations >= FEW * peak:
        return ""
    return (
        f"Activations take no more than {format_bytes(activations)}, {activations / peak:.0%} of the peak, at "
        f"{given.batch_size} x {given.seq_length} tokens: the input is too short for a plan to free much. More tokens "
        "a batch make it worth while."
    )


def loss_sentence(plan: Plan, memory: Memory) -> str:
    """Return that the logits make the peak, and where the next thing is in the way."""
    peak = memory.step.peak
    if not is_logits(peak):
        return ""
    others = [moment for moment in memory.step.moments if is_beyond_logits(moment)]
    above = ""
    if others:
        following = max(others, key=lambda moment: moment.total_bytes)
        above = (
            f", {format_bytes(peak.total_bytes - following.total_bytes)} above all that has nothing to do with them: that "
            f"reaches {format_bytes(following.total_bytes)}{_fitting(memory, following.total_bytes)}, in "
            f"{place_text(following)}"
        )
    return (
        f"The logits make the peak{above}. No plan of activations frees them. What helps: a chunked or fused linear cross "
        f"entropy (use_liger_kernel=True in TrainingArguments), or {_fewer_tokens(memory)}."
    )


def optimizer_sentence(plan: Plan, memory: Memory) -> str:
    """Return that the peak stands in the optimizer's step, after all activations are gone."""
    peak = memory.step.peak
    if peak.phase is not Phase.OPTIMIZER:
        return ""
    temporary = peak.bytes_for(Use.WORKSPACE)
    if memory.optimizer == "adamw" and temporary:
        return (
            f"The peak stands in the optimizer's step: AdamW makes {format_bytes(temporary)} of temporary tensors there. "
            "What helps: the fused one, which makes none (--optimizer adamw-fused; optim='adamw_torch_fused' in "
            "TrainingArguments)."
        )
    return (
        f"The peak stands in the optimizer's step, where {format_bytes(peak.bytes_for(Use.ACTIVATIONS))} of activations "
        "are left: no plan of activations lowers it."
    )


def unreached_sentence(plan: Plan, memory: Memory) -> str:
    """Return that the peak falls by much less than the plan frees, even if all copies end at once."""
    freed = account(plan).net_freed_bytes if plan.decisions else 0
    fall = memory.baseline.peak.total_bytes - memory.planned_low_bytes
    if freed <= 0 or fall >= REACHES * freed:
        return ""
    lower = min(memory.planned, key=lambda step: step.peak.total_bytes)
    falls = f"falls by {format_bytes(fall)} only" if fall > 0 else "does not fall"
    return (
        f"The plan frees {format_bytes(freed)} between forward and backward, but the peak {falls}: with the plan, and "
        f"copies that end at once, it stands in {place_text(lower.peak)}, where what it frees would be gone anyway, or is "
        "back already."
    )


def inflight_sentence(plan: Plan, memory: Memory) -> str:
    """Return that offloaded tensors on their way out keep the peak up, where nothing limits them."""
    gap = memory.planned_high_bytes - memory.planned_low_bytes
    fall = max(0, memory.baseline.peak.total_bytes - memory.planned_low_bytes)
    if not _offloads(plan) or (plan.offload and plan.offload.max_inflight is not None) or gap <= (1 - REACHES) * fall:
        return ""
    return (
        f"Copies that are still on their way hold up to {format_bytes(gap)} at the peak. What helps: max_inflight: 1 in "
        "activation_offload, so that the computation waits for them."
    )


def window_sentence(plan: Plan, memory: Memory) -> str:
    """Return that copying out takes longer than the forward that hides it, and how much would fit."""
    window, copy_us = memory.step.us_of(Phase.FORWARD), memory.copy_out_us
    if copy_us <= window:
        return ""
    fits = int(window * memory.device.copy_out_bytes_per_second / 1e6)
    share = f"{format_bytes(fits)} of the {format_bytes(memory.copied_out_bytes)} fit{_share(plan, memory, fits)}"
    return (
        f"Copies out take up to {ms_text(copy_us - window)} longer than the forward that hides them, which is predicted to "
        f"take {ms_text(window)} or more; what is left costs time. {share}."
    )


def tight_sentence(plan: Plan, memory: Memory) -> str:
    """Return that what fits may still be too much for the device, whose allocator needs more than it hands out."""
    peak = memory.planned_high_bytes
    spare = (memory.device_memory_bytes or 0) - peak
    if not 0 <= spare < TIGHT * peak:
        return ""
    return (
        f"It fits by {format_bytes(spare)}, and may still fail: CUDA's context takes about half a GiB, and the allocator "
        "loses memory between blocks (1 to 13 % of the peak in measured runs). What helps: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )


def host_sentence(plan: Plan, memory: Memory) -> str:
    """Return that the copies take much of the host's memory."""
    if memory.host_pinned_bytes <= MUCH_HOST_BYTES:
        return ""
    return (
        f"The copies lie in {format_bytes(memory.host_pinned_bytes)} of pinned host memory, for each process of the host; "
        "none of it can be swapped to disk. Look that the host, or the container's limit, has so much."
    )


def room_sentence(plan: Plan, memory: Memory) -> str:
    """Return whether a plan could make a step fit that does not, where none was asked for."""
    short = memory.short_bytes(memory.baseline.peak.total_bytes)
    if plan.decisions or not short or memory.short_bytes(_fixed_bytes(memory)):
        return ""
    activations = memory.baseline.peak.bytes_for(Use.ACTIVATIONS)
    if activations <= short:
        return (
            f"The peak would be short by {format_bytes(short - activations)} even without its {format_bytes(activations)} "
            f"of activations: no plan of activations alone makes it fit. What helps: {_fewer_tokens(memory)}."
        )
    return (
        f"Activations take {format_bytes(activations)} of the peak, and {format_bytes(short)} are missing: a plan may make "
        "it fit. Try --checkpoint selective, --checkpoint full, or --offload with --recompute."
    )


_PARTS: tuple[Callable[[Plan, Memory], str], ...] = (
    room_sentence,
    loss_sentence,
    optimizer_sentence,
    fixed_sentence,
    few_activations_sentence,
    unreached_sentence,
    inflight_sentence,
    window_sentence,
    tight_sentence,
    host_sentence,
)


def _fixed_bytes(memory: Memory) -> int:
    """Return what is there at once beside activations, with any plan of them."""
    return sum(memory.step.most_for(use) for use in (Use.PARAMETERS, Use.GRADIENTS, Use.OPTIMIZER))


def _fitting(memory: Memory, peak_bytes: int) -> str:
    """Return that another peak would fit, where the one of the step does not."""
    return " (which fits)" if memory.fits is False and not memory.short_bytes(peak_bytes) else ""


def _fixed_remedies(memory: Memory) -> Iterator[str]:
    """Yield what makes parameters, gradients or optimizer state smaller than they are."""
    gradients, state = (memory.step.most_for(use) for use in (Use.GRADIENTS, Use.OPTIMIZER))
    if gradients and not memory.grad_in_backward:
        yield f"updating each parameter in backward (--grad-in-backward drops {format_bytes(gradients)} of gradients)"
    if state:
        yield f"an 8-bit optimizer (its state takes {format_bytes(state)} now)"
    if gradients > memory.step.most_for(Use.PARAMETERS) / 2 or memory.grad_in_backward:
        yield "LoRA"
    yield "sharding over several devices (FSDP)"


def _fewer_tokens(memory: Memory) -> str:
    """Return that batches may be smaller and more, and what the gradients take that then wait for the last one."""
    gradients = memory.step.most_for(Use.GRADIENTS)
    waiting = f" (whose {format_bytes(gradients)} of gradients stay meanwhile: --accumulate-gradients predicts that)"
    there = memory.accumulate_gradients or memory.grad_in_backward
    return f"fewer tokens a batch with more steps of gradient accumulation{'' if there else waiting}"


def _offloads(plan: Plan) -> bool:
    return any(d.policy == OFFLOAD and d.action is Action.SWAP for d in plan.decisions.values())


def _share(plan: Plan, memory: Memory, fits: int) -> str:
    """Return what to set so that no more is copied than fits."""
    if not _offloads(plan):
        totals = account(plan)
        margin = totals.covered_bytes - totals.swap_bytes + memory.copied_out_bytes - fits
        return f": --passes attention-swap:margin_bytes={margin},prefetch-chain swaps no more"
    now = plan.offload.fraction if plan.offload else 1.0
    share = floor(100 * now * fits / memory.copied_out_bytes) / 100
    if not share:
        return ""
    return f": fraction: {share} in activation_offload offloads about as much"
