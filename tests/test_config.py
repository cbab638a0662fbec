"""The config: what it takes, what it refuses, in which words."""

import pytest

from memopt.config import (
    Config,
    load_config,
    parse_config,
    passes_for,
    validate_activation_checkpoint,
    validate_attention_swap,
)
from memopt.errors import (
    IllegalValueError,
    IncompatibleError,
    MemoptError,
    RequestError,
    UnknownNameError,
    UnreadableFileError,
)
from memopt.passes import ActivationCheckpoint, make_pass


def loaded(tmp_path, text):
    path = tmp_path / "memopt.yaml"
    path.write_text(text)
    return load_config(path)


def test_the_default_changes_nothing():
    assert Config() == Config(
        activation_swap="none", activation_checkpoint="off", enable_compile=False, pp_size=1, backend="torch"
    )
    assert passes_for(Config()) == ()


def test_attention_asks_for_swap_and_chain():
    assert passes_for(Config(activation_swap="attention")) == ("attention-swap", "prefetch-chain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_swap": "mlp"}, "activation_swap='mlp' is not legal; legal: none, attention"),
        ({"activation_swap": True}, "activation_swap=True is not legal; legal: none, attention"),
        ({"activation_swap": ["attention"]}, "activation_swap=['attention'] is not legal; legal: none, attention"),
        (
            {"activation_checkpoint": "on"},
            "activation_checkpoint='on' is not legal; legal: off, full, selective",
        ),
        (
            {"activation_checkpoint": True},
            "activation_checkpoint=True is not legal; legal: off, full, selective; YAML reads on, yes and true as True",
        ),
        (
            {"activation_checkpoint": "attention-only"},
            "activation_checkpoint='attention-only' is not legal; legal: off, full, selective; that is a preset for "
            "code: memopt.plan(graph, passes=[ActivationCheckpoint(mode='attention-only')])",
        ),
        ({"pp_size": 0}, "pp_size=0 is not legal; legal: a whole number from 1"),
        ({"pp_size": "two"}, "pp_size='two' is not legal; legal: a whole number"),
        ({"enable_compile": "perhaps"}, "enable_compile='perhaps' is not legal; legal: true, false"),
        ({"enable_compile": "yes"}, "enable_compile='yes' is not legal; legal: true, false"),
        ({"pp_size": "2"}, "pp_size='2' is not legal; legal: a whole number"),
        ({"backend": 3}, "backend=3 is not legal; legal: a name"),
    ],
)
@pytest.mark.parametrize("make", [parse_config, lambda options: Config(**options)])
def test_an_illegal_value_names_key_value_and_the_legal_ones(make, options, message):
    with pytest.raises(IllegalValueError) as error:
        make(options)
    assert str(error.value) == message
    assert error.value.exit_code == 2


def test_an_unknown_key_names_the_nearest(tmp_path):
    with pytest.raises(
        UnknownNameError, match="no config key is called 'activation_swp'; did you mean 'activation_swap'"
    ):
        loaded(tmp_path, "activation_swp: attention\n")


@pytest.mark.parametrize("text", ["mod: full", "mode: full\n  mod: off", "mode: full\n  policy: mine"])
def test_an_unknown_key_of_checkpointing_names_the_one_there_is(tmp_path, text):
    with pytest.raises(UnknownNameError, match=r"no key of activation_checkpoint is called '\w+'; .*legal: mode$"):
        loaded(tmp_path, f"activation_checkpoint:\n  {text}\n")


@pytest.mark.parametrize("value", ["on", "true", "{mode: on}"])
def test_yaml_that_says_on_is_told_the_legal_values(tmp_path, value):
    with pytest.raises(
        IllegalValueError, match=r"activation_checkpoint=True is not legal; legal: off, full, selective"
    ):
        loaded(tmp_path, f"activation_checkpoint: {value}\n")


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", Config()),
        ("activation_swap: attention\n", Config(activation_swap="attention")),
        ("activation_swap: none\nactivation_checkpoint: off\n", Config()),
        ("activation_swap: null\nactivation_checkpoint:\n", Config()),
        ("activation_checkpoint: 'off'\n", Config()),
        ("activation_checkpoint: selective\n", Config(activation_checkpoint="selective")),
        ("activation_checkpoint:\n  mode: full\n", Config(activation_checkpoint="full")),
        ("activation_checkpoint:\n  mode: off\n", Config()),
        ("activation_checkpoint:\n  mode:\n", Config()),
        ("activation_checkpoint: {}\n", Config()),
        ("activation_checkpoint: off\n", Config()),
        ("pp_size: 2\nenable_compile: true\n", Config(pp_size=2, enable_compile=True)),
    ],
)
def test_yaml_means_what_it_says(tmp_path, text, config):
    assert loaded(tmp_path, text) == config


def test_a_key_given_twice_is_named(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"memopt.yaml' cannot be read: line 3: key 'pp_size' is given twice"):
        loaded(tmp_path, "pp_size: 1\nactivation_swap: attention\npp_size: 2\n")


def test_bad_yaml_names_the_file_and_the_line(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"config '.*memopt.yaml' cannot be read: line 2: "):
        loaded(tmp_path, "activation_swap: attention\npp_size: 1: 2\n")


@pytest.mark.parametrize("text", ["- attention\n", "attention\n"])
def test_yaml_without_keys_is_refused(tmp_path, text):
    with pytest.raises(UnreadableFileError, match="no 'key: value' lines"):
        loaded(tmp_path, text)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "memopt.yaml").write_bytes(b"\xff\xfe\x00\x01\x02")
    with pytest.raises(UnreadableFileError):
        load_config(tmp_path / "memopt.yaml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"nothing\.yaml' cannot be read: No such file"):
        load_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_compile": True}, "activation_swap='attention' is incompatible with torch.compile"),
        (
            {"activation_checkpoint": "full"},
            "activation_swap='attention' is incompatible with activation checkpointing; drop one of the two",
        ),
        (
            {"activation_checkpoint": "selective"},
            "activation_swap='attention' is incompatible with activation checkpointing; drop one of the two",
        ),
        ({"pp_size": 2}, "activation_swap='attention' does not support pipeline parallelism"),
        (
            {"backend": "mindspore"},
            "activation_swap='attention' supports only the PyTorch backend (backend='torch'), not 'mindspore'",
        ),
    ],
)
def test_what_attention_swap_excludes(options, message):
    validate_attention_swap(Config(**options))
    config = Config(activation_swap="attention", **options)
    for check in (validate_attention_swap, passes_for):
        with pytest.raises(IncompatibleError) as error:
            check(config)
        assert str(error.value) == message


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_asks_for_one_pass(mode):
    assert passes_for(Config(activation_checkpoint=mode)) == (f"activation-checkpoint:mode={mode}",)
    compiled = Config(activation_checkpoint=mode, enable_compile=True, pp_size=2)
    assert passes_for(compiled) == (f"activation-checkpoint:mode={mode}:compiles=true",)
    assert [make_pass(text) for text in passes_for(compiled)] == [ActivationCheckpoint(mode=mode, compiles=True)]


def test_checkpointing_excludes_other_frameworks():
    with pytest.raises(IncompatibleError) as error:
        passes_for(Config(activation_checkpoint="full", backend="mindspore"))
    assert str(error.value) == (
        "activation_checkpoint='full' supports only the PyTorch backend (backend='torch'), not 'mindspore'"
    )
    validate_activation_checkpoint(Config(backend="mindspore"))


def test_every_error_is_a_value_error():
    assert issubclass(MemoptError, ValueError)


REGION_NAMES = (
    "attn_norm, qkv_linear, qk_norm, core_attn, attn_proj, mlp_norm, mlp_fc1, mlp_act, mlp_fc2, router, expert_fc1, "
    "moe_act, moe_fc2, shared_expert, fused_group_mlp, module:PATTERN"
)
RECOMPUTE_NAMES = "layernorm, moe_act, mlp_act, mlp, moe, shared_expert"


def offload(*modules, **options):
    return {"activation_offload": {"modules": list(modules), **options}}


def recompute(*modules):
    return {"recompute": {"modules": list(modules)}}


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("activation_offload: {modules: [core_attn]}", "fine-grained-offload:modules=core_attn"),
        ("activation_offload:\n  modules: core_attn, attn_proj", "fine-grained-offload:modules=core_attn+attn_proj"),
        ("activation_offload: {modules: [core_attn, core_attn]}", "fine-grained-offload:modules=core_attn"),
        (
            "activation_offload: {modules: ['module:model.layers.*'], max_inflight: null, margin: null}",
            "fine-grained-offload:modules=module:model.layers.*",
        ),
        (
            "pp_size: 4\npp_rank: 2\nactivation_offload: {modules: [core_attn], fraction: 0.5, max_inflight: 0, "
            "pp_rank_delta_bytes: 5, margin: 0, min_tensor_elements: 7}",
            "fine-grained-offload:modules=core_attn:min_tensor_elements=7:fraction=0.5:max_inflight=0:"
            "pp_rank_delta_bytes=5:margin=0:pp_rank=2",
        ),
    ],
)
def test_offload_asks_for_a_pass_and_the_chain(tmp_path, text, asked):
    config = loaded(tmp_path, text + "\n")
    assert passes_for(config) == (asked, "prefetch-chain")
    made = make_pass(asked)
    assert made.modules == config.activation_offload.modules
    assert {key: getattr(made, key) for key in ("fraction", "margin", "max_inflight")} == {
        key: getattr(config.activation_offload, key) for key in ("fraction", "margin", "max_inflight")
    }


def test_recompute_comes_before_the_offload_that_depends_on_it():
    config = Config(**offload("core_attn"), **recompute("layernorm", "moe_act"))
    assert passes_for(config) == (
        "recompute-parts:modules=layernorm+moe_act",
        "fine-grained-offload:modules=core_attn",
        "prefetch-chain",
    )
    assert passes_for(Config(**recompute("mlp"))) == ("recompute-parts:modules=mlp",)
    assert passes_for(parse_config({"activation_offload": None, "recompute": None})) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"activation_offload": {}},
            f"activation_offload.modules=() is not legal; legal: one or more of {REGION_NAMES}; "
            "to switch it off leave the section out",
        ),
        (
            offload(" ", ""),
            f"activation_offload.modules=[' ', ''] is not legal; legal: one or more of {REGION_NAMES}; "
            "to switch it off leave the section out",
        ),
        (
            offload("cor_attn", "attention", "core_attn", "zzz"),
            "activation_offload.modules does not know 'cor_attn', 'attention', 'zzz'; "
            f"did you mean 'core_attn' and 'attn_proj'? legal: {REGION_NAMES}",
        ),
        (
            offload("module:"),
            "activation_offload.modules='module:' is not legal; legal: module:PATTERN, "
            "for example module:model.layers.*.mlp",
        ),
        (
            {"activation_offload": {"modules": [3]}},
            f"activation_offload.modules=[3] is not legal; legal: a list of {REGION_NAMES}",
        ),
        (
            {"activation_offload": "core_attn"},
            "activation_offload='core_attn' is not legal; legal: a mapping, for example {modules: [core_attn, attn_proj]}",
        ),
        (
            {"activation_offload": {"module": "core_attn"}},
            "no key of activation_offload is called 'module'; did you mean 'modules'? "
            "legal: fraction, margin, max_inflight, min_tensor_elements, modules, pp_rank_delta_bytes",
        ),
        (
            offload("attn_proj", "qkv_linear"),
            "activation_offload.modules: attn_proj needs core_attn, which holds the same storage for backward; "
            "add core_attn or drop attn_proj",
        ),
        (
            offload("fused_group_mlp", "moe_fc2", "expert_fc1"),
            "activation_offload.modules: fused_group_mlp is the whole block of experts, expert_fc1 and moe_fc2 included; "
            "drop one or the other",
        ),
        *(
            (
                offload("core_attn", fraction=value),
                f"activation_offload.fraction={value!r} is not legal; legal: a number from 0 to 1",
            )
            for value in (-0.1, 1.01, 2, True, "half", float("nan"), [1])
        ),
        *(
            (
                offload("core_attn", **{key: value}),
                f"activation_offload.{key}={value!r} is not legal; legal: a whole number from 0",
            )
            for key in ("min_tensor_elements", "pp_rank_delta_bytes")
            for value in (-1, 1.0, True, "1")
        ),
        *(
            (
                offload("core_attn", margin=value),
                f"activation_offload.margin={value!r} is not legal; legal: auto, or a whole number of bytes from 0",
            )
            for value in ("none", -1, 0.5, True)
        ),
        *(
            (
                offload("core_attn", max_inflight=value),
                f"activation_offload.max_inflight={value!r} is not legal; "
                "legal: null for no limit, or a whole number of layers from 0",
            )
            for value in (-1, 1.5, False)
        ),
        (
            {"recompute": {"modules": []}},
            f"recompute.modules=[] is not legal; legal: one or more of {RECOMPUTE_NAMES}; "
            "to switch it off leave the section out",
        ),
        (
            recompute("layer_norm", "attention"),
            "recompute.modules does not know 'layer_norm', 'attention'; did you mean 'layernorm'? "
            f"legal: {RECOMPUTE_NAMES}",
        ),
        (
            recompute("moe", "moe_act"),
            "recompute.modules: moe is recomputed as a whole, moe_act included; drop one or the other",
        ),
        ({"pp_size": 2, "pp_rank": 2}, "pp_rank=2 is not legal; legal: 0..1, which pp_size=2 sets"),
        ({"pp_rank": -1}, "pp_rank=-1 is not legal; legal: 0..0, which pp_size=1 sets"),
        ({"pp_rank": True}, "pp_rank=True is not legal; legal: a whole number"),
    ],
)
@pytest.mark.parametrize("make", [parse_config, lambda options: Config(**options)])
def test_what_offload_and_recompute_refuse(make, options, message):
    with pytest.raises(RequestError) as error:
        make(options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            offload("core_attn") | {"activation_checkpoint": "full"},
            "activation_offload is incompatible with activation_checkpoint='full', which recomputes whole layers; "
            "drop one of the two",
        ),
        (
            recompute("layernorm") | {"activation_checkpoint": "selective"},
            "recompute is incompatible with activation_checkpoint='selective', which recomputes whole layers; "
            "drop one of the two",
        ),
        (
            offload("core_attn") | {"activation_swap": "attention"},
            "activation_offload is incompatible with activation_swap='attention'; drop it, and name core_attn and "
            "attn_proj in activation_offload instead",
        ),
        (
            recompute("layernorm") | {"enable_compile": True},
            "recompute is incompatible with torch.compile; set enable_compile to false",
        ),
        (
            offload("core_attn") | {"backend": "mindspore"},
            "activation_offload supports only the PyTorch backend (backend='torch'), not 'mindspore'",
        ),
        (
            offload("core_attn", "router", "expert_fc1") | recompute("moe"),
            "recompute of moe leaves nothing saved to offload in router and expert_fc1; drop one or the other",
        ),
        (
            offload("mlp_fc2") | recompute("mlp"),
            "recompute of mlp leaves nothing saved to offload in mlp_fc2; drop one or the other",
        ),
    ],
)
def test_what_offload_and_recompute_exclude(options, message):
    with pytest.raises(IncompatibleError) as error:
        passes_for(parse_config(options))
    assert str(error.value) == message


def test_offload_runs_under_pipeline_parallelism():
    assert passes_for(Config(**offload("core_attn"), pp_size=4, pp_rank=3))[0].endswith(":pp_rank=3")


def test_a_key_of_a_section_given_twice_is_named(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"line 3: key 'modules' is given twice"):
        loaded(tmp_path, "activation_offload:\n  modules: [core_attn]\n  modules: [router]\n")
