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
