"""The flags that both commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from memopt.ir.regions import REGIONS


@dataclass(frozen=True)
class Whole:
    """Limit a flag to the whole numbers of a range."""

    first: int
    last: int

    def __call__(self, type_: Any, value: int | None) -> None:
        """Raise a ValueError that names the range; cyclopts puts the flag and its value before it."""
        if value is not None and not self.first <= value <= self.last:
            raise ValueError(f"Legal: {self.first}..{self.last}.")


COUNT = Whole(1, 2**31 - 1)
SEED = Whole(0, 2**63 - 1)
"""What torch takes: a generator's seed is an int64."""

Model = Annotated[
    str,
    Parameter(
        help="A preset, a config.json, a model directory, a hub id in the local cache (nothing is downloaded), or "
        "package.module:factory, where factory() returns a model."
    ),
]
ConfigFile = Annotated[
    Path | None,
    Parameter(
        name="--config",
        help="A YAML file with activation_swap, activation_offload, recompute, activation_checkpoint and further keys.",
    ),
]
Swap = Annotated[
    Literal["none", "attention"] | None,
    Parameter(help="What to swap to pinned host memory; it outranks the file's activation_swap."),
]
Checkpoint = Annotated[
    Literal["off", "full", "selective"] | None,
    Parameter(
        help="What to compute a second time in backward instead of saving it: full, everything in the layers (least "
        "memory, about a third more computation); selective, what is cheap and every second matrix product (more memory, "
        "less computation). It outranks the file's activation_checkpoint, and excludes --swap attention."
    ),
]
OffloadList = Annotated[
    str | None,
    Parameter(
        name="--offload",
        help="Parts of every layer to move to pinned host memory, with commas between: "
        + ", ".join(REGIONS)
        + "; fused_group_mlp (expert_fc1, moe_act and moe_fc2 as one); module:PATTERN, all that modules save whose "
        "names match (* crosses dots). attn_proj needs core_attn. It outranks the file's activation_offload.modules.",
    ),
]
RecomputeList = Annotated[
    str | None,
    Parameter(
        name="--recompute",
        help="Parts of every layer to compute a second time in backward, with commas between: layernorm, moe_act, "
        "mlp_act, whose outputs are not kept either; mlp, moe, shared_expert as whole modules. It outranks the file's "
        "recompute.modules, and goes together with --offload.",
    ),
]
Passes = Annotated[
    str | None,
    Parameter(
        help="Passes to run, each with its options, instead of --config, --swap, --checkpoint, --offload and --recompute: "
        "attention-swap,prefetch-chain or activation-checkpoint:mode=full:compiles=true or "
        "fine-grained-offload:modules=core_attn+attn_proj:fraction=0.5,prefetch-chain."
    ),
]
BatchSize = Annotated[
    int | None, Parameter(help="Sequences a batch. Default: the model's preset, else 1.", validator=COUNT)
]
SeqLength = Annotated[
    int | None, Parameter(help="Tokens a sequence. Default: the model's preset, else 1024.", validator=COUNT)
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    Parameter(help="Of the weights. Default: the model's preset, else what its config says, else bfloat16."),
]
Autocast = Annotated[
    Literal["none", "bfloat16", "float16"] | None, Parameter(help="Run forward under torch.autocast. Default: none.")
]
AttnImplementation = Annotated[
    str | None, Parameter(help="As transformers names it: sdpa, eager, flash_attention_2, ... Default: sdpa.")
]
NumLayers = Annotated[
    int | None, Parameter(help="Build this many layers instead of the config's number.", validator=COUNT)
]
Optimizer = Annotated[
    Literal["adamw", "adamw-fused", "sgd", "none"] | None,
    Parameter(
        help="Which optimizer the predicted step has. adamw makes temporary tensors as large as the gradients, adamw-fused "
        "none; sgd has no momentum. Default: adamw-fused, as transformers' Trainer."
    ),
]
AccumulateGradients = Annotated[
    bool,
    Parameter(
        negative="",
        help="Predict a step of several between two of the optimizer: the gradients of earlier batches are there from its "
        "start.",
    ),
]
GradInBackward = Annotated[
    bool,
    Parameter(negative="", help="Predict that each parameter is updated in backward, its gradient dropped at once."),
]
DeviceMemory = Annotated[
    str | None,
    Parameter(help="How much memory there is, as 80GiB, 24GB or 80e9: does the step fit, or by how much is it short?"),
]
DeviceProfile = Annotated[
    str | None,
    Parameter(
        help="How fast the device computes and copies: h200, h100, a100, rtx4090, or a file that memopt-apply "
        "--profile-out wrote. Default: h200."
    ),
]
Predict = Annotated[
    bool,
    Parameter(help="Predict the memory of a training step, with the plan and without it. It takes some seconds."),
]
Output = Annotated[Path | None, Parameter(help="Write the report to this file instead of stdout.")]
Debug = Annotated[bool, Parameter(negative="", help="Show tracebacks and the warnings of libraries.")]
