"""memopt-apply: put a plan into effect on a training run, and prove that nothing but memory changes."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from memopt.cli import options
from memopt.cli.app import make_app
from memopt.cli.output import progress, show
from memopt.cli.request import Flags, InputRequest, PlanRequest
from memopt.cli.run import run
from memopt.cli.verdict import proof_report
from memopt.errors import VerificationError

app = make_app(
    "memopt-apply",
    """    memopt-apply tiny-qwen3-moe --swap attention
    memopt-apply tiny-qwen3-moe --checkpoint selective
    memopt-apply tiny-qwen3-moe --recompute layernorm,moe_act
    memopt-apply tiny-qwen3-moe --plan plan.json --steps 10
    memopt-apply my_package.models:build --config memopt.yaml --device cuda --autocast bfloat16
    memopt-apply qwen3-30b-a3b --swap attention --num-layers 4 --device cuda --format json""",
)


@app.default
def apply(
    model: options.Model,
    /,
    *,
    config: options.ConfigFile = None,
    plan: Annotated[Path | None, Parameter(help="A plan that memopt-analyze --save-plan wrote.")] = None,
    swap: options.Swap = None,
    checkpoint: options.Checkpoint = None,
    offload: options.OffloadList = None,
    recompute: options.RecomputeList = None,
    passes: options.Passes = None,
    steps: Annotated[int, Parameter(help="Training steps of each run.", validator=options.COUNT)] = 3,
    batch_size: options.BatchSize = None,
    seq_length: options.SeqLength = None,
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    attn_implementation: options.AttnImplementation = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Parameter(help="Where to train. auto takes an accelerator if there is one.")
    ] = "auto",
    num_layers: options.NumLayers = None,
    seed: Annotated[int, Parameter(help="Of the weights, the batches and dropout.", validator=options.SEED)] = 0,
    verify: Annotated[
        bool, Parameter(negative="--no-verify", help="Train without the plan too, and compare every gradient.")
    ] = True,
    format: Annotated[Literal["text", "json"], Parameter(help="How to write the report.")] = "text",
    output: options.Output = None,
    debug: options.Debug = False,
) -> None:
    """Train a few steps with a plan and without it, from the same weights on the same batches, and compare.

    Give one of --config, --plan, --passes, --swap and --checkpoint, or --offload and --recompute. Batches are random
    tokens. Losses and gradients must be equal bit for bit; where the kernels of an accelerator are not deterministic, as
    near as the run without the plan is to itself.
    """
    flags = Flags(config=config, swap=swap, checkpoint=checkpoint, offload=offload, recompute=recompute)
    asked = PlanRequest.of(flags, plan=plan, passes=passes)
    request = InputRequest(
        batch_size=batch_size,
        seq_length=seq_length,
        dtype=dtype,
        autocast=autocast,
        attn_implementation=attn_implementation,
    )
    with progress(f"Loading {model}") as say:
        from memopt.cli.preparing import prepare
        from memopt.cli.proof import prove

        trial = prepare(model, asked, request, device=device, steps=steps, num_layers=num_layers, seed=seed, say=say)
        proof = prove(trial, verify=verify)
    show(proof_report(proof, name=model, num_steps=steps), proof.values, format=format, output=output)
    if proof.faults:
        raise VerificationError(f"verification failed: {'; '.join(proof.faults)}")


def main() -> None:
    """Run the command."""
    raise SystemExit(run(app))
