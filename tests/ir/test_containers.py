"""Which container holds a model's layers: lookup, wrappers, and the traps of unknown trees."""

import peft
import pytest
import torch
import transformers
from torch import nn

from memopt.errors import NoLayerContainerError
from memopt.ir import layer_containers
from tests.ir.trees import containers, fake, graph_of_model, made, native_layer, on_meta, plain_layer, stack


class ModuleList(nn.ModuleList):
    """A subclass, as FSDP2 makes one by swapping the class."""


class MyStack(ModuleList):
    """Another name still."""


def embedding():
    return nn.Embedding(64, 8)


def keyed(*keys):
    return nn.ModuleDict({key: plain_layer() for key in keys})


def language(model):
    """Return the FQN and number of layers of a model that has one tower."""
    [(role, fqn, num_layers)] = containers(model)
    assert role == "language"
    return fqn, num_layers


def test_layers_are_named_in_order_with_the_real_fqns():
    [container] = layer_containers(graph_of_model(fake("Model", {"model.layers": stack(12)})))
    assert container.fqn == "model.layers"
    assert container.layers == tuple(f"model.layers.{index}" for index in range(12))


@pytest.mark.parametrize("path", ["model.layers", "layers"])
def test_the_usual_paths_come_before_any_search(path):
    assert language(fake("Model", {path: stack(2), "other.blocks": stack(9, native_layer)})) == (path, 2)


@pytest.mark.parametrize("held", [ModuleList([plain_layer()]), MyStack([plain_layer()]), keyed("0"), keyed("4", "10")])
def test_what_is_a_container(held):
    assert language(fake("Model", {"layers": held})) == ("layers", len(held))


@pytest.mark.parametrize(
    "held", [nn.ModuleList(), nn.ModuleDict(), keyed("a"), keyed("0", "a"), nn.Sequential(plain_layer())]
)
def test_what_is_no_container(held):
    with pytest.raises(NoLayerContainerError):
        containers(fake("Model", {"layers": held}))


def test_an_empty_container_gives_way_to_one_with_layers():
    model = fake("Model", {"model.layers": nn.ModuleDict(), "decoder.blocks": keyed("0", "1")})
    assert language(model) == ("decoder.blocks", 2)


def test_a_list_that_holds_something_unnumbered_besides():
    layers = stack(3)
    layers.add_module("norm", nn.LayerNorm(8))
    assert language(fake("Model", {"layers": layers})) == ("layers", 3)


def test_keys_are_ordered_as_numbers_and_a_layer_counts_once():
    layers = [plain_layer() for _ in range(11)]
    model = fake("Model", {"last": layers[-1], "layers": nn.ModuleList([*layers, layers[0]])})
    [container] = layer_containers(graph_of_model(model))
    assert container.layers == (*(f"layers.{index}" for index in range(10)), "last")


def test_a_property_is_no_path():
    def layers(self):
        return self.deep.blocks

    model = fake("Model", {"deep.blocks": stack(2)})
    type(model).layers = property(layers)
    assert language(model) == ("deep.blocks", 2)


# Registered classes


def test_the_first_path_that_leads_to_layers_counts_per_role():
    model = fake(
        "Gemma3ForConditionalGeneration",
        {
            "model.language_model.layers": nn.ModuleList(),
            "language_model.model.layers": stack(5),
            "vision_tower.vision_model.encoder.layers": stack(9),
        },
    )
    assert containers(model) == [
        ("language", "language_model.model.layers", 5),
        ("vision", "vision_tower.vision_model.encoder.layers", 9),
    ]


def test_a_registered_class_is_never_guessed_about():
    model = fake("Qwen2VLForConditionalGeneration", {"text.blocks": stack(5)})
    with pytest.raises(
        NoLayerContainerError, match=r"^.*Qwen2VLForConditionalGeneration.*model\.language_model\.layers"
    ):
        containers(model)


def test_a_vision_tower_alone_does_not_hide_that_the_language_tower_moved():
    model = fake("Qwen2VLForConditionalGeneration", {"text.blocks": stack(5), "model.visual.blocks": stack(9)})
    with pytest.raises(NoLayerContainerError):
        containers(model)


def test_a_subclass_of_a_registered_class_is_registered():
    parent = type(fake("GPT2LMHeadModel", {}))
    tree = {"transformer.h": stack(2), "blocks": stack(9, native_layer)}
    assert language(fake("MyModel", tree, (parent,))) == ("transformer.h", 2)
    assert language(fake("FSDPMyModel", tree, (type(fake("MyModel", {}, (parent,))),))) == ("transformer.h", 2)


def test_a_class_counts_before_the_classes_it_inherits_from():
    parent = type(fake("GPT2LMHeadModel", {}))
    model = fake("NemotronHForCausalLM", {"transformer.h": stack(2), "backbone.layers": stack(3)}, (parent,))
    assert language(model) == ("backbone.layers", 3)


# Wrappers


def wrapped(class_name, path, model):
    return fake(class_name, {path: model})


@pytest.mark.parametrize(
    ("class_name", "path"),
    [
        ("BiEncoderModel", "model"),
        ("CrossEncoderModel", "model"),
        ("FSDPBiEncoderModel", "model"),
        ("PeftModel", "base_model.model"),
        ("DistributedDataParallel", "module"),
        ("OptimizedModule", "_orig_mod"),
    ],
)
def test_a_wrapper_is_opened(class_name, path):
    model = fake("GPT2LMHeadModel", {"transformer.h": stack(2), "decoy": stack(9, native_layer)})
    assert language(wrapped(class_name, path, model)) == (f"{path}.transformer.h", 2)
    nested = wrapped("DistributedDataParallel", "module", wrapped(class_name, path, model))
    assert language(nested) == (f"module.{path}.transformer.h", 2)


def test_a_wrapper_is_opened_before_the_usual_paths():
    model = fake("BiEncoderModel", {"model": fake("GPT2Model", {"layers": stack(9), "h": stack(2)})})
    assert language(model) == ("model.h", 2)


def gpt2():
    config = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=64)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("config", "fqn"),
    [
        (peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True), "base_model.model.transformer.h"),
        (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "base_model.transformer.h"),
    ],
)
def test_peft_itself(config, fqn):
    assert language(peft.get_peft_model(gpt2(), config)) == (fqn, 3)


def test_a_tuner_without_a_peft_model_around_it():
    tuner = peft.LoraModel(gpt2(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True), "default")
    assert language(tuner) == ("model.transformer.h", 3)


def test_an_adapter_named_by_a_number_is_no_container():
    model = peft.get_peft_model(
        fake("Model", {"a": fake("Inner", {"blocks": stack(2)}), "config": nn.Identity()}),
        peft.LoraConfig(target_modules=["self_attn"]),
        adapter_name="0",
    )
    assert language(model) == ("base_model.model.a.blocks", 2)


def test_compile_itself():
    assert language(torch.compile(gpt2())) == ("_orig_mod.transformer.h", 3)


# Unknown trees


def test_experts_longer_than_the_layers():
    def moe_layer():
        return made("MoeLayer", self_attn=nn.Linear(8, 8), **{"mlp.experts": stack(16)})

    assert language(fake("Model", {"tower.blocks": stack(2, moe_layer)})) == ("tower.blocks", 2)


def test_experts_in_layers_of_several_classes():
    dense, moe = plain_layer(), made("MoeLayer", self_attn=nn.Linear(8, 8), **{"mlp.experts": stack(16)})
    assert language(fake("Model", {"tower.blocks": nn.ModuleList([dense, moe])})) == ("tower.blocks", 2)


@pytest.mark.parametrize("vision", ["vision_tower", "visual", "vit", "image_encoder", "audio.tower"])
@pytest.mark.parametrize("layer", [plain_layer, native_layer])
def test_a_deeper_tower_of_another_modality(vision, layer):
    model = fake("Model", {f"{vision}.blocks": stack(9, native_layer), "text.blocks": stack(2, layer)})
    assert language(model) == ("text.blocks", 2)


def test_a_deeper_vision_tower_told_by_its_class():
    tower = fake("CLIPVisionTransformer", {"blocks": stack(9, native_layer)})
    assert language(fake("VisionLanguageModel", {"a": tower, "b.blocks": stack(2)})) == ("b.blocks", 2)


def test_a_deeper_tower_told_by_the_tokens():
    tree = {"a.positions": nn.Embedding(4, 8), "a.blocks": stack(9, native_layer)}
    assert language(fake("Model", {**tree, "b.tokens": embedding(), "b.blocks": stack(2)})) == ("b.blocks", 2)


def test_decoys_in_the_language_tower():
    tree = {
        "text.tokens": embedding(),
        "text.projections": nn.ModuleList(nn.Linear(99, 99) for _ in range(9)),
        "text.mergers": nn.ModuleList(made("Merger", norm=nn.LayerNorm(8), fc=nn.Linear(8, 8)) for _ in range(9)),
    }
    assert language(fake("Model", {**tree, "text.blocks": stack(2, native_layer)})) == ("text.blocks", 2)
    assert language(fake("Model", {**tree, "text.blocks": stack(20)})) == ("text.blocks", 20)


def test_adaptive_embeddings_are_no_layers_though_they_are_nearest_to_the_tokens():
    tree = {"words.parts": nn.ModuleList([embedding(), embedding()]), "blocks": stack(2)}
    assert language(fake("Model", tree)) == ("blocks", 2)


def test_a_list_of_towers():
    towers = [fake("Vision", {"blocks": stack(9)}), fake("Text", {"tokens": embedding(), "blocks": stack(2)})]
    assert language(fake("Model", {"towers": nn.ModuleList(towers)})) == ("towers.1.blocks", 2)


def test_a_vision_model_by_itself():
    tree = {"visual.blocks": stack(9, native_layer), "visual.mergers": stack(12)}
    assert language(fake("Model", tree)) == ("visual.blocks", 9)


def test_linears_where_there_is_nothing_else():
    assert language(fake("Model", {"fc": nn.ModuleList([nn.Linear(8, 8)])})) == ("fc", 1)


def test_no_container_at_all():
    with pytest.raises(NoLayerContainerError) as error:
        containers(wrapped("DistributedDataParallel", "module", fake("Perceptron", {"fc": nn.Linear(8, 8)})))
    assert str(error.value) == (
        "activation_checkpoint found no layers in Perceptron: it has no non-empty ModuleList or ModuleDict with "
        "numbers for keys; keep its layers in an nn.ModuleList, or set activation_checkpoint to off"
    )


def test_both_towers_of_an_encoder_decoder_inside_a_vision_model():
    model = fake(
        "Model",
        {
            "vision.encoder.blocks": stack(30, native_layer),
            "text.shared": embedding(),
            "text.encoder.block": stack(3),
            "text.decoder.block": stack(2),
        },
    )
    assert containers(model) == [("encoder", "text.encoder.block", 3), ("decoder", "text.decoder.block", 2)]


def test_an_encoder_beside_which_nothing_decodes():
    tree = {"bert.tokens": embedding(), "bert.encoder.layer": stack(3), "bert.decoder": nn.Linear(8, 8)}
    assert language(fake("Model", tree)) == ("bert.encoder.layer", 3)


@pytest.mark.parametrize(
    ("class_name", "options", "expected"),
    [
        (
            "BartForConditionalGeneration",
            {"encoder_layers": 3, "decoder_layers": 2},
            [("encoder", "model.encoder.layers", 3), ("decoder", "model.decoder.layers", 2)],
        ),
        (
            "T5ForConditionalGeneration",
            {"num_layers": 3, "num_decoder_layers": 2},
            [("encoder", "encoder.block", 3), ("decoder", "decoder.block", 2)],
        ),
        (
            "WhisperForConditionalGeneration",
            {"encoder_layers": 3, "decoder_layers": 2},
            [("encoder", "model.encoder.layers", 3), ("decoder", "model.decoder.layers", 2)],
        ),
        ("OPTForCausalLM", {"num_hidden_layers": 3}, [("language", "model.decoder.layers", 3)]),
        ("BertForMaskedLM", {"num_hidden_layers": 3}, [("language", "bert.encoder.layer", 3)]),
        ("ViTModel", {"num_hidden_layers": 3}, [("language", "layers", 3)]),
        ("LlamaForCausalLM", {"num_hidden_layers": 3}, [("language", "model.layers", 3)]),
        ("Qwen3MoeForCausalLM", {"num_hidden_layers": 3}, [("language", "model.layers", 3)]),
    ],
)
def test_classes_of_transformers_that_are_not_registered(class_name, options, expected):
    cls = getattr(transformers, class_name)
    assert containers(on_meta(lambda: cls(cls.config_class(**options)))) == expected
