"""Every wrong request: its exit code, and the one line on stderr."""

import importlib.util
import json
import re

import pytest
import torch

from memopt.cli import analyze as analyze_command
from memopt.cli.run import run
from memopt.errors import SWAP_AND_CHECKPOINT, RequestError
from memopt.presets import preset_path

BOTH = pytest.mark.parametrize("name", ["memopt-analyze", "memopt-apply"])
SWAP = {"action": "swap", "by": "hand", "why": "why not", "policy": "attention"}
TINY = ("tiny-llama", "--num-layers", "1", "--batch-size", "1", "--seq-length", "16")


@BOTH
def test_no_model(fails, name):
    code, line = fails(name)
    assert code == 2
    assert "MODEL" in line


@BOTH
def test_unknown_model_names_the_nearest_and_the_other_forms(fails, name):
    code, line = fails(name, "qwen3-30b", "--swap", "attention")
    assert code == 2
    assert line.startswith("no model is called 'qwen3-30b'; did you mean ")
    assert "'qwen3-30b-a3b'" in line.partition("?")[0]
    assert line.endswith(
        "; or a config.json, a model directory, a hub id in the local cache, or package.module:factory"
    )


@BOTH
def test_a_hub_id_that_is_not_in_the_cache(fails, name):
    code, line = fails(name, "nobody/nothing-at-all", "--swap", "attention")
    assert code == 2
    assert "no model is called 'nobody/nothing-at-all'" in line


@BOTH
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--swap", "mlp"], ["--swap", "mlp", "none", "attention"]),
        (["--checkpoint", "some"], ["--checkpoint", "some", "off", "full", "selective"]),
        (
            ["--passes", "activation-checkpoint:mod=full"],
            ["no option of activation-checkpoint is called 'mod'; did you mean 'mode'"],
        ),
        (
            ["--passes", "activation-checkpoint:mode"],
            ["option 'mode' of activation-checkpoint has no value; write mode=VALUE"],
        ),
        (["--passes", "activation-checkpoint:mode=off"], ["mode='off' is not legal; legal: full, selective"]),
        (
            ["--swap", "attention", "--checkpoint", "full"],
            ["activation_swap='attention' is incompatible with activation checkpointing"],
        ),
        (["--swap", "attention", "--dtype", "int8"], ["--dtype", "int8", "float32", "bfloat16", "float16"]),
        (["--swap", "attention", "--autocast", "int8"], ["--autocast", "int8", "none"]),
        (["--swap", "attention", "--batch-size", "0"], ['"0" for --batch-size', "Legal: 1..2147483647"]),
        (["--swap", "attention", "--batch-size", str(2**31)], ["for --batch-size", "Legal: 1..2147483647"]),
        (["--swap", "attention", "--seq-length", str(2**70)], ["for --seq-length", "Legal: 1..2147483647"]),
        (["--swap", "attention", "--seq-length", "many"], ["--seq-length", "many", "int"]),
        (["--swap", "attention", "--num-layers", "-1"], ["for --num-layers", "Legal: 1..2147483647"]),
        (
            ["--passes", ""],
            [
                "passes='' is not legal; legal: activation-checkpoint, attention-swap, fine-grained-offload, prefetch-chain"
            ],
        ),
        (
            ["--passes", " ,"],
            [
                "passes=' ,' is not legal; legal: activation-checkpoint, attention-swap, fine-grained-offload, ",
                "prefetch-chain, recompute-parts",
            ],
        ),
        (
            ["--offload", ""],
            ["activation_offload.modules='' is not legal; legal: one or more of attn_norm, qkv_linear"],
        ),
        (
            ["--offload", "core_attn,cor,zzz"],
            [
                "activation_offload.modules does not know 'cor', 'zzz'; did you mean",
                "legal: attn_norm, ",
                "module:PATTERN",
            ],
        ),
        (["--offload", "attn_proj"], ["activation_offload.modules: attn_proj needs core_attn"]),
        (["--offload", "core_attn,module:"], ["modules='module:' is not legal; legal: module:PATTERN"]),
        (
            ["--recompute", "norm"],
            ["recompute.modules does not know 'norm'; did you mean 'layernorm'? legal: layernorm, "],
        ),
        (
            ["--offload", "expert_fc1", "--recompute", "moe"],
            ["recompute of moe leaves nothing saved to offload in expert_fc1"],
        ),
        (
            ["--offload", "core_attn", "--swap", "attention"],
            ["activation_offload is incompatible with activation_swap"],
        ),
        (
            ["--recompute", "mlp", "--checkpoint", "full"],
            ["recompute is incompatible with activation_checkpoint='full'"],
        ),
        (["--passes", "fine-grained-offload:fraction=2"], ["fraction=2 is not legal; legal: a number from 0 to 1"]),
        (["--passes", "recompute-parts:modules=layernorm+x"], ["modules does not know 'x'; legal: layernorm, "]),
        (["--swap", "attention", "--format", "pdf"], ["--format", "pdf", "text", "json"]),
        (["--swap", "attention", "--sequence-length", "8"], ["--sequence-length"]),
        (["--passes", "attention-swp"], ["no pass is called 'attention-swp'", "did you mean 'attention-swap'"]),
    ],
)
def test_illegal_values_name_the_legal_ones(fails, name, arguments, parts):
    code, line = fails(name, "tiny-llama", *arguments)
    assert code == 2
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("flag", "value", "legal"),
    [
        ("--steps", 0, "1..2147483647"),
        ("--steps", 2**31, "1..2147483647"),
        ("--seed", -1, "0..9223372036854775807"),
        ("--seed", 2**63, "0..9223372036854775807"),
    ],
)
def test_the_numbers_of_a_training_run_have_a_range(fails, flag, value, legal):
    code, line = fails("memopt-apply", "tiny-llama", "--swap", "attention", flag, value)
    assert (code, line) == (2, f'Invalid value "{value}" for {flag}. Legal: {legal}.')


@BOTH
def test_an_empty_model_name(fails, name):
    code, line = fails(name, "", "--swap", "attention")
    assert (code, line.startswith("no model is called ''; legal: llama-3.1-8b, ")) == (2, True)


@BOTH
def test_a_second_model(fails, name):
    code, line = fails(name, "tiny-llama", "tiny-qwen3-moe", "--swap", "attention")
    assert (code, line.startswith("there is one MODEL; 'tiny-qwen3-moe' is one too many")) == (2, True)


@BOTH
@pytest.mark.parametrize("passes", ["attention-swap", "activation-checkpoint:mode=full"])
@pytest.mark.parametrize(
    "asked",
    [
        ("--swap", "none"),
        ("--swap", "attention"),
        ("--checkpoint", "off"),
        ("--checkpoint", "selective"),
        ("--offload", "core_attn"),
        ("--recompute", "layernorm"),
    ],
)
def test_passes_exclude_the_other_switches(fails, name, passes, asked):
    """Whichever of the two were dropped, somebody would miss it."""
    code, line = fails(name, "tiny-llama", *asked, "--passes", passes)
    assert (code, line) == (2, f"--passes lists all that is done; give it without {' '.join(asked)}")


@BOTH
def test_passes_exclude_a_configuration(fails, tmp_path, name):
    path = tmp_path / "memopt.yaml"
    path.write_text("enable_compile: true\n")
    flags = ("--config", path, "--checkpoint", "full", "--passes", "activation-checkpoint")
    code, line = fails(name, "tiny-llama", *flags)
    assert (code, line) == (
        2,
        f"--passes lists all that is done; give it without --config {path} and --checkpoint full",
    )


@BOTH
def test_a_model_without_layers_is_a_failure_of_the_work(fails, name):
    code, line = fails(name, "tests.cli.factories:no_layers", "--checkpoint", "full", "--batch-size", 1)
    assert (code, line.startswith("activation_checkpoint found no layers in NoLayers: ")) == (1, True)


@BOTH
@pytest.mark.parametrize(
    "passes", ["attention-swap,activation-checkpoint", "activation-checkpoint,attention-swap,prefetch-chain"]
)
def test_swapped_passes_exclude_checkpointing(fails, name, passes):
    code, line = fails(name, *TINY, "--passes", passes)
    assert (code, line) == (2, SWAP_AND_CHECKPOINT)


@BOTH
def test_one_pass_with_two_sets_of_options(fails, name):
    code, line = fails(name, *TINY, "--passes", "activation-checkpoint,activation-checkpoint:mode=selective")
    assert code == 2
    assert line.startswith(
        "activation-checkpoint was run before with other options, and decided otherwise on 'model.la"
    )


@BOTH
def test_a_chain_before_anything_is_decided_is_refused(fails, name):
    code, line = fails(name, "tiny-llama", "--passes", "prefetch-chain,attention-swap")
    assert code == 2
    assert line.endswith("chains what was decided before it; give attention-swap,prefetch-chain")


@BOTH
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("activation_swp: attention", "no config key is called 'activation_swp'; did you mean 'activation_swap'"),
        ("activation_swap: mlp", "activation_swap='mlp' is not legal; legal: none, attention"),
        ("pp_size: 1\npp_size: 1", "memopt.yaml' cannot be read: line 2: key 'pp_size' is given twice"),
        ("enable_compile: 'yes'", "enable_compile='yes' is not legal; legal: true, false"),
        ("a: b: c", "memopt.yaml' cannot be read: line 1: "),
        ("activation_swap: attention\npp_size: 2", "activation_swap='attention' does not support pipeline parallelism"),
        ("activation_checkpoint: full\nbackend: jax", "activation_checkpoint='full' supports only the PyTorch backend"),
        (
            "activation_swap: attention\nactivation_checkpoint: full",
            "activation_swap='attention' is incompatible with activation checkpointing",
        ),
    ],
)
def test_bad_configs(fails, tmp_path, name, text, part):
    (tmp_path / "memopt.yaml").write_text(text)
    code, line = fails(name, "tiny-llama", "--config", tmp_path / "memopt.yaml")
    assert code == 2
    assert part in line


@BOTH
def test_a_config_that_is_not_there(fails, tmp_path, name):
    code, line = fails(name, "tiny-llama", "--config", tmp_path / "no.yaml")
    assert (code, "no.yaml' cannot be read: No such file" in line) == (2, True)


@BOTH
@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no-such-type"}', "{}"])
def test_a_model_config_that_is_none(fails, tmp_path, name, text):
    (tmp_path / "config.json").write_text(text)
    for path in (tmp_path, tmp_path / "config.json"):
        code, line = fails(name, path, "--swap", "attention")
        assert (code, "model config" in line, "cannot be read" in line) == (2, True, True)


@BOTH
@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"hidden_size": "abc"}, 'hidden_size must be a whole number, not "abc"'),
        ({"vocab_size": None}, "vocab_size must be a whole number, not null"),
        ({"architectures": [3]}, "architectures must be a list or null, not [3]"),
        ({"rope_parameters": "x"}, 'rope_parameters must be an object or null, not "x"'),
        ({"num_attention_heads": 7}, "The hidden size (256) is not a multiple of the number of attention heads (7)."),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be from 1, not -1"),
        ({"vocab_size": 0}, "vocab_size must be from 1, not 0"),
        ({"dtype": "int99"}, "dtype: torch has none called 'int99'"),
        ([], "it is not a JSON object {...}"),
    ],
)
def test_a_model_config_with_a_bad_field_names_it(fails, tmp_path, name, facts, why):
    if isinstance(facts, dict):
        facts = json.loads(preset_path("tiny-llama").read_text()) | facts
    (tmp_path / "config.json").write_text(json.dumps(facts))
    code, line = fails(name, tmp_path, "--swap", "attention")
    assert (code, line) == (2, f"model config '{tmp_path}/config.json' cannot be read: {why}")


@BOTH
def test_a_directory_without_a_config(fails, tmp_path, name):
    code, line = fails(name, tmp_path, "--swap", "attention")
    assert (code, "config.json' cannot be read: No such file" in line) == (2, True)


@BOTH
@pytest.mark.parametrize(
    ("factory", "part"),
    [
        ("no.such.module:build", "No module named 'no'"),
        ("tests.cli.factories:nothing", "has no attribute 'nothing'"),
        ("tests.cli.factories:no_model", "returned str, not a torch.nn.Module"),
        ("tests.cli.factories:no_tokens", "takes no input_ids"),
    ],
)
def test_bad_factories(fails, name, factory, part):
    code, line = fails(name, factory, "--swap", "attention")
    assert code == 2
    assert part in line


@BOTH
def test_an_unknown_attention_names_the_legal_ones(fails, name):
    code, line = fails(name, *TINY, "--swap", "attention", "--attn-implementation", "sdpaa")
    assert code == 2
    assert line.startswith("attn_implementation='sdpaa' is not legal; legal: eager, ")
    legal = line.partition("legal: ")[2].split(", ")
    assert {"eager", "sdpa"} <= set(legal)
    assert ("flash_attention_2" in legal) == bool(importlib.util.find_spec("flash_attn"))
    assert not any(value.startswith("paged") for value in legal)
    assert fails(name, *TINY, "--attn-implementation", "paged|sdpa", *["--swap", "attention"])[0] == 2


@BOTH
def test_an_attention_that_is_not_installed(fails, name):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("it is installed here")
    code, line = fails(name, *TINY, "--swap", "attention", "--attn-implementation", "flash_attention_2")
    assert (code, "attn_implementation='flash_attention_2' is not available here" in line) == (2, True)


@BOTH
def test_num_layers_is_for_configs(fails, name):
    code, line = fails(name, "tests.cli.factories:llama", "--swap", "attention", "--num-layers", "1")
    assert (code, "--num-layers changes a config" in line) == (2, True)


@BOTH
def test_no_self_attn_is_a_failure_of_the_work(fails, name):
    code, line = fails(name, "tests.cli.factories:gpt2", "--swap", "attention", "--batch-size", 1, "--seq-length", 16)
    assert (code, line) == (
        1,
        "activation_swap='attention' found no self_attn modules in GPT2LMHeadModel; "
        "expected attention modules registered as self_attn",
    )


@BOTH
def test_an_output_that_cannot_be_written(fails, tmp_path, name):
    code, line = fails(name, *TINY, "--swap", "none", "--output", tmp_path / "no" / "report.txt")
    assert (code, "report.txt' cannot be written: No such file" in line) == (2, True)


def test_a_plan_that_cannot_be_written(fails, tmp_path):
    code, line = fails("memopt-analyze", *TINY, "--save-plan", tmp_path / "no" / "plan.json")
    assert (code, "plan.json' cannot be written: No such file" in line) == (2, True)


def test_a_report_is_no_plan(command, fails, tmp_path):
    path = tmp_path / "report.json"
    for name in ("memopt-analyze", "memopt-apply"):
        command(name, *TINY, "--checkpoint", "full", "--format", "json", "--output", path)
        code, line = fails("memopt-apply", *TINY, "--plan", path)
        why = "it is a report; memopt-analyze --save-plan PLAN.json writes a plan"
        assert (code, line) == (2, f"plan '{path}' cannot be read: {why}")


def test_more_tokens_than_the_model_has_positions(fails):
    code, line = fails("memopt-apply", "tests.cli.factories:gpt2", "--checkpoint", "full", "--seq-length", 640)
    assert code == 2
    assert line.startswith("--seq-length 640 is more than the model's max_position_embeddings=128, and it fails: index")


def test_report_and_plan_want_a_file_each(fails, tmp_path):
    path = tmp_path / "x"
    code, line = fails("memopt-analyze", *TINY, "--output", path, "--save-plan", tmp_path / "." / "x")
    assert (code, line) == (2, f"--output and --save-plan both name '{path}'; give each its own file")
    assert not path.exists()


def test_apply_wants_something_to_apply(fails):
    code, line = fails("memopt-apply", "tiny-llama")
    assert (code, line) == (
        2,
        "what to apply? give one of --config FILE, --plan PLAN.json, --passes LIST, --swap attention, "
        "--offload core_attn, --recompute layernorm and --checkpoint full",
    )


def test_a_plan_excludes_other_decisions(fails, tmp_path):
    flags = (
        "--swap attention",
        "--checkpoint full",
        "--passes attention-swap",
        "--offload core_attn",
        "--recompute mlp",
    )
    for given in map(str.split, flags):
        code, line = fails("memopt-apply", "tiny-llama", "--plan", tmp_path / "plan.json", *given)
        assert (code, line.startswith("--plan holds all decisions")) == (2, True)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("prefetch_chain", ["model"], "prefetch_chain: prefetch chain names 'model', on which nothing is decided"),
        ("decisions", [["model", "rope", SWAP]], "decisions: decision on 'model:rope': no region is called 'rope'"),
    ],
)
def test_a_plan_that_contradicts_itself(command, fails, tmp_path, key, value, part):
    path = tmp_path / "plan.json"
    assert command("memopt-analyze", *TINY, "--swap", "attention", "--no-predict", "--save-plan", path)[0] == 0
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prefetch_chain": [], key: value}))
    code, line = fails("memopt-apply", *TINY, "--plan", path)
    assert (code, line.startswith(f"plan '{path}' cannot be read: {part}")) == (2, True)


@pytest.mark.parametrize("text", [None, "", "{}", '{"schema_version": 99}'])
def test_an_unreadable_plan(fails, tmp_path, text):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    code, line = fails("memopt-apply", "tiny-llama", "--plan", path)
    assert (code, "plan.json' cannot be read: " in line) == (2, True)


@pytest.mark.parametrize(("name", "num_layers"), [("tiny-qwen3-moe", "1"), ("tiny-llama", "2")])
def test_a_plan_for_another_model(command, fails, tmp_path, name, num_layers):
    path = tmp_path / "plan.json"
    assert command("memopt-analyze", *TINY, "--swap", "attention", "--no-predict", "--save-plan", path)[0] == 0
    code, line = fails("memopt-apply", name, "--num-layers", num_layers, "--plan", path, "--no-verify")
    assert code == 2
    assert line.startswith("plan for another model: it was made for tiny-llama, a LlamaForCausalLM of ")
    assert f"; here is {name}, a " in line
    made, here = re.findall(r"[\d,]{5,}", line)
    assert made != here


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda(fails):
    code, line = fails("memopt-apply", "tiny-llama", "--swap", "attention", "--device", "cuda")
    assert (code, line) == (
        2,
        "device='cuda' is not available: this torch sees no CUDA device; legal here: auto, cpu",
    )


def test_debug_shows_the_traceback():
    with pytest.raises(RequestError):
        run(analyze_command.app, ["no-such-model", "--debug"])


def test_an_interrupt_is_quiet(monkeypatch, capfd):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("memopt.cli.analyze.trace", interrupt)
    assert run(analyze_command.app, list(TINY)) == 130
    assert capfd.readouterr() == ("", "")


def test_an_error_of_a_library_is_one_line_too(monkeypatch, capfd):
    def fail(*args, **options):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("memopt.cli.analyze.trace", fail)
    assert run(analyze_command.app, list(TINY)) == 1
    assert capfd.readouterr().err == "error: RuntimeError: first line second line (--debug shows where)\n"
