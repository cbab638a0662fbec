"""memopt-analyze: what would a plan do for this model's memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from memopt.cli import options
from memopt.cli.app import make_app
from memopt.cli.output import progress, show, writing
from memopt.cli.predicting import PredictionFlags, predict_or_note, prediction_request
from memopt.cli.request import Flags, InputRequest, make_passes
from memopt.cli.run import run
from memopt.errors import RequestError

if TYPE_CHECKING:
    from memopt.cli.models import Source
    from memopt.ir import ModuleGraph

app = make_app(
    "memopt-analyze",
    """    memopt-analyze qwen3-30b-a3b --swap attention
    memopt-analyze qwen3-8b --swap attention --seq-length 4096 --format json
    memopt-analyze qwen3-30b-a3b --checkpoint selective --seq-length 4096
    memopt-analyze qwen3-30b-a3b --offload core_attn,attn_proj,expert_fc1 --recompute layernorm,moe_act
    memopt-analyze llama-3.1-8b --swap attention --seq-length 4096 --device-memory 80GiB
    memopt-analyze my_package.models:build --config memopt.yaml --save-plan plan.json
    memopt-analyze llama-3.1-8b --swap attention --format html --output plan.html
    memopt-analyze deepseek_v3.json --list-regions""",
)


@app.default
def analyze(
    model: options.Model,
    /,
    *,
    config: options.ConfigFile = None,
    swap: options.Swap = None,
    checkpoint: options.Checkpoint = None,
    offload: options.OffloadList = None,
    recompute: options.RecomputeList = None,
    passes: options.Passes = None,
    batch_size: options.BatchSize = None,
    seq_length: options.SeqLength = None,
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    attn_implementation: options.AttnImplementation = None,
    num_layers: options.NumLayers = None,
    target_device: Annotated[
        Literal["cuda", "cpu"], Parameter(help="Where the model will train. cuda needs no GPU here.")
    ] = "cuda",
    predict: options.Predict = True,
    optimizer: options.Optimizer = None,
    grad_in_backward: options.GradInBackward = False,
    accumulate_gradients: options.AccumulateGradients = False,
    device_memory: options.DeviceMemory = None,
    device_profile: options.DeviceProfile = None,
    format: Annotated[Literal["text", "json", "svg", "html"], Parameter(help="How to write the report.")] = "text",
    output: options.Output = None,
    save_plan: Annotated[Path | None, Parameter(help="Also write the plan to this file, for memopt-apply.")] = None,
    list_regions: Annotated[
        bool,
        Parameter(negative="", help="Show instead of a plan which named regions the layers have, each with its bytes."),
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Trace one training step of a model, without weights or GPU, and show what a plan does for its memory."""
    if output and save_plan and output.resolve() == save_plan.resolve():
        raise RequestError(f"--output and --save-plan both name {str(output)!r}; give each its own file")
    flags = Flags(config=config, swap=swap, checkpoint=checkpoint, offload=offload, recompute=recompute)
    if list_regions:
        _check_alone(flags, passes=passes, save_plan=save_plan)
    prediction = prediction_request(
        PredictionFlags(
            optimizer=optimizer,
            grad_in_backward=grad_in_backward,
            accumulate_gradients=accumulate_gradients,
            device_memory=device_memory,
            device_profile=device_profile,
        ),
        predict=predict,
        list_regions=list_regions,
        format=format,
    )
    pipeline = make_passes(passes, flags)
    request = InputRequest(
        batch_size=batch_size,
        seq_length=seq_length,
        dtype=dtype,
        autocast=autocast,
        attn_implementation=attn_implementation,
    )
    with progress(f"Loading {model}") as say:
        import memopt
        from memopt.cli.models import find_model
        from memopt.report import plan_report, plan_summary, regions_report, regions_values

        source = find_model(model, num_layers=num_layers)
        given = request.over(source.default)
        say(f"Tracing {source.name}")
        graph = trace(source, request, target_device)
        plan = memopt.plan(graph, passes=pipeline)
        if prediction:
            say(f"Predicting the memory of a step of {source.name}")
        shown, memory = predict_or_note(prediction, plan, source, given)
    title = f"memopt {source.name}"
    if list_regions:
        show(regions_report(graph), regions_values(graph), format=format, output=output, title=title)
        return
    if save_plan:
        with writing("plan", save_plan):
            memopt.save_plan(plan, save_plan)
    page, values = plan_report(shown, memory), plan_summary(shown, memory)
    show(page, values, format=format, output=output, title=title, memory=memory)


def _check_alone(flags: Flags, *, passes: str | None, save_plan: Path | None) -> None:
    """Refuse flags about a plan beside --list-regions, which makes none."""
    values = (("--passes", passes), ("--save-plan", save_plan))
    given = [*flags.given(), *(f"{flag} {value}" for flag, value in values if value is not None)]
    if given:
        raise RequestError(
            f"--list-regions shows what there is and plans nothing; give it without {' and '.join(given)}"
        )


def trace(source: "Source", request: InputRequest, target_device: str) -> "ModuleGraph":
    """Trace a model that was found, on the input that the flags ask for."""
    import memopt
    from memopt.cli.models import adapt_live, attention_of, positions_of

    given = request.over(source.default)
    with attention_of(given.attn_implementation), positions_of(source.config, given.seq_length):
        if source.live is not None:
            adapt_live(source.live, dtype=request.dtype, attn_implementation=request.attn_implementation)
        return memopt.analyze(
            source.config if source.live is None else source.live,
            batch_size=given.batch_size,
            seq_length=given.seq_length,
            dtype=given.dtype,
            autocast=given.autocast,
            attn_implementation=given.attn_implementation,
            target_device=target_device,
            name=source.name,
        )


def main() -> None:
    """Run the command."""
    raise SystemExit(run(app))
