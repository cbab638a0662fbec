"""memopt-apply: put a plan into effect on a training run, and prove that nothing but memory changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from memopt.cli import options
from memopt.cli.app import make_app
from memopt.cli.output import progress, show, writing
from memopt.cli.request import Flags, InputRequest, PlanRequest
from memopt.cli.run import run
from memopt.cli.verdict import proof_report
from memopt.errors import RequestError, VerificationError

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
    profile_out: Annotated[
        Path | None,
        Parameter(
            help="Also measure the accelerator, how fast it computes and copies, and write that to this JSON file, for "
            "memopt-analyze --device-profile."
        ),
    ] = None,
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
    if profile_out and output and output.resolve() == profile_out.resolve():
        raise RequestError(f"--output and --profile-out both name {str(output)!r}; give each its own file")
    with progress(f"Loading {model}") as say:
        if profile_out:
            write_profile(profile_out, device, say)
        from memopt.cli.preparing import prepare
        from memopt.cli.proof import prove

        trial = prepare(model, asked, request, device=device, steps=steps, num_layers=num_layers, seed=seed, say=say)
        proof = prove(trial, verify=verify)
    show(proof_report(proof, name=model, num_steps=steps), proof.values, format=format, output=output)
    if proof.faults:
        raise VerificationError(f"verification failed: {'; '.join(proof.faults)}")


def write_profile(path: Path, device: str, say: Callable[[str], None]) -> None:
    """Measure the accelerator that is asked for, before a model is on it; raises RequestError where there is none."""
    from memopt.cli.building import pick_device
    from memopt.ir import save_device
    from memopt.predict.measure import measure_device

    target = pick_device(device)
    if target.type != "cuda":
        raise RequestError(f"--profile-out measures a CUDA device, and the run is on {target.type}; leave it out")
    say(f"Measuring {target}")
    with writing("profile", path):
        save_device(measure_device(target), path)


def main() -> None:
    """Run the command."""
    raise SystemExit(run(app))
