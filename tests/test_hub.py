"""Writing for others: names, files, what transformers makes of them, and the way back."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from mdsd.config import ModelConfig, YarnConfig
from mdsd.model.generate import Sampling, tell_story
from mdsd.model.hub import (
    INDEX,
    MAIN_INDEX,
    HubError,
    dequantize_blocks,
    fill_shards,
    new_folder,
    published_config,
    save_pretrained,
)
from mdsd.model.published import from_pretrained
from mdsd.model.transformer import MiniDeepSeek
from mdsd.training.tokenizer import GPT2_VOCAB, gpt2_ids, gpt2_tokenizer

TOLERANCE = 1e-4  # absolute, on logits with a standard deviation near 1

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    intermediate_size=40,
    moe_intermediate_size=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
    max_position_embeddings=64,
)


def hardened(config: ModelConfig, seed: int = 0) -> MiniDeepSeek:
    """Return a model whose logits depend on everything: large matrices, decisive biases."""
    torch.manual_seed(seed)
    model = MiniDeepSeek(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() > 1 else parameter.normal_(1, 0.3)
        for gate in model.gates():
            gate.e_score_correction_bias.uniform_(-1, 1)
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Assert bit for bit the same names and numbers."""
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not ours[name].equal(theirs[name].to(ours[name].dtype))]
    assert different == []


@st.composite
def configs(draw) -> ModelConfig:
    """Draw small models of every kind that can be built."""
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    groups, size = number(1, 3), number(2, 3)
    open_groups = number(1, groups)
    yarn = YarnConfig(factor=4.0, original_max_position_embeddings=16)
    return ModelConfig(
        vocab_size=number(7, 40),
        hidden_size=8 * number(1, 4),
        num_hidden_layers=number(1, 3),
        num_attention_heads=number(1, 3),
        kv_lora_rank=number(3, 12),
        q_lora_rank=draw(st.none() | st.integers(3, 12)),
        qk_nope_head_dim=number(2, 8),
        qk_rope_head_dim=2 * number(1, 4),
        v_head_dim=number(2, 8),
        intermediate_size=number(4, 20),
        moe_intermediate_size=number(3, 9),
        n_routed_experts=groups * size,
        n_shared_experts=number(0, 2),
        num_experts_per_tok=number(1, open_groups * size),
        n_group=groups,
        topk_group=open_groups,
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        first_k_dense_replace=number(0, 2),
        num_nextn_predict_layers=number(0, 2),
        rope_theta=draw(st.sampled_from([10_000.0, 500.0])),
        rope_scaling=draw(st.sampled_from([None, yarn, replace(yarn, mscale_all_dim=0.4)])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-3])),
        max_position_embeddings=64,
        initializer_range=0.3,
    )


# --- our own way back -----------------------------------------------------------------------------


@given(configs(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(2_000, 50_000))
@settings(max_examples=25, deadline=None)
def test_a_model_comes_back_bit_for_bit(tmp_path_factory, config, dtype, largest):
    folder = tmp_path_factory.mktemp("hub") / "model"
    model = hardened(config).to(dtype)
    save_pretrained(model, folder, max_shard_bytes=largest)
    back = from_pretrained(folder, dtype)
    assert back.config == config
    assert not back.training
    assert_same(state_of(model), state_of(back))


# --- transformers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def load(transformers, folder: Path) -> nn.Module:
    """Return the model that transformers loads; nothing may be missing or left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()


def logits_of(model: nn.Module, vocab_size: int) -> Tensor:
    tokens = torch.randint(vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


CONFIGS = {
    "base": SMALL,
    "direct queries": replace(SMALL, q_lora_rank=None),
    "yarn": replace(SMALL, rope_scaling=YarnConfig(factor=4, original_max_position_embeddings=16)),
    "two MTP modules": replace(SMALL, num_nextn_predict_layers=2),
    "no MTP module": replace(SMALL, num_nextn_predict_layers=0),
    "no shared expert": replace(SMALL, n_shared_experts=0),
    "dense layers only": replace(SMALL, first_k_dense_replace=3),
}


@pytest.mark.parametrize("largest", [10**9, 20_000], ids=["whole", "sharded"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_transformers_gives_the_same_logits(transformers, tmp_path, config, largest):
    model = hardened(config)
    save_pretrained(model, tmp_path / "model", max_shard_bytes=largest)
    there = load(transformers, tmp_path / "model")
    ours, theirs = (logits_of(each, config.vocab_size) for each in (model, there))
    assert 0.5 < theirs.std() < 5, "at this scale the comparison is blind"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@given(configs(), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
@settings(max_examples=12, deadline=None)
@pytest.mark.filterwarnings("ignore:.*MTP modules", "ignore:Initializing zero-element")
def test_there_and_back_is_bit_identical(transformers, tmp_path_factory, config, dtype, sharded):
    folder = tmp_path_factory.mktemp("hub")
    model = hardened(config).to(dtype)
    save_pretrained(model, folder / "out", max_shard_bytes=3000 if sharded else 10**9)
    there = load(transformers, folder / "out")
    assert there.dtype == dtype
    there.save_pretrained(folder / "back", max_shard_size="3KB" if sharded else "1GB")
    back = from_pretrained(folder / "back", dtype)
    assert back.config == replace(config, num_nextn_predict_layers=0)  # it keeps no MTP modules
    main = {name: x for name, x in state_of(model).items() if not name.startswith("mtp.")}
    assert_same(main, state_of(back))


def test_transformers_finds_mtp_modules_by_their_published_names(
    transformers, tmp_path, monkeypatch
):
    layers = pytest.importorskip("transformers.modeling_layers")
    model = hardened(replace(SMALL, first_k_dense_replace=0))
    save_pretrained(model, tmp_path / "model", max_shard_bytes=20_000)
    there = load(transformers, tmp_path / "model")
    # It looks for layer 61; here the module is layer 3.
    monkeypatch.setattr(there, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3\."])
    module = layers.MtpModel.from_pretrained(there).layers[0]
    names = {"block.": "mtp_block.", "norm.": "post_norm."}
    for name, parameter in model.mtp[0].named_parameters():
        ours = next((name.replace(a, b, 1) for a, b in names.items() if name.startswith(a)), name)
        assert parameter.equal(module.get_parameter(ours)), name


def cut_tokenizer():
    text = "One day, Tom and Mia went to the park. They were happy friends."
    return gpt2_tokenizer().cut(np.bincount(gpt2_ids(text), minlength=GPT2_VOCAB))


def test_the_pipeline_tells_our_story(transformers, tmp_path):
    tokenizer = cut_tokenizer()
    model = hardened(replace(SMALL, vocab_size=tokenizer.vocab_size))
    save_pretrained(model, tmp_path / "model", tokenizer)
    tell = transformers.pipeline("text-generation", str(tmp_path / "model"))
    greedy = Sampling(temperature=0)
    ours = "".join(tell_story(model, tokenizer, "One day, Tom", 20, greedy))
    assert tell("One day, Tom", do_sample=False, max_new_tokens=20)[0]["generated_text"] == ours
    settings_ = tell.model.generation_config
    assert settings_.eos_token_id == settings_.bos_token_id == tokenizer.eot_id
    assert (settings_.do_sample, settings_.temperature) == (True, Sampling.temperature)


# --- files ----------------------------------------------------------------------------------------


def tensors_in(folder: Path) -> dict[str, Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert sum(map(len, files)) == len({name for file in files for name in file}), "written twice"
    return {name: tensor for file in files for name, tensor in file.items()}


def test_names_are_the_published_ones(tmp_path):
    model = hardened(SMALL)
    save_pretrained(model, tmp_path / "model")
    names = set(tensors_in(tmp_path / "model"))
    attention = (
        "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj"
    ).split()
    swiglu = ["gate_proj", "up_proj", "down_proj"]
    block = {f"self_attn.{name}.weight" for name in attention}
    block |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    dense = block | {f"mlp.{name}.weight" for name in swiglu}
    moe = block | {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"}
    moe |= {f"mlp.shared_experts.{name}.weight" for name in swiglu}
    moe |= {f"mlp.experts.{expert}.{name}.weight" for expert in range(8) for name in swiglu}
    own = "enorm hnorm eh_proj embed_tokens shared_head.norm shared_head.head".split()
    mtp = moe | {f"{name}.weight" for name in own}
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer, inner in enumerate([dense, moe, moe, mtp]):
        expected |= {f"model.layers.{layer}.{name}" for name in inner}
    assert names == expected


def test_each_expert_is_its_part_of_the_stack(tmp_path):
    model = hardened(SMALL)
    save_pretrained(model, tmp_path / "model")
    tensors, experts = tensors_in(tmp_path / "model"), model.layers[1].mlp.experts
    for expert in range(8):
        gate, up, down = (
            tensors[f"model.layers.1.mlp.experts.{expert}.{name}.weight"]
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        assert torch.cat([gate, up]).equal(experts.gate_up_proj[expert])
        assert down.equal(experts.down_proj[expert])


def test_mtp_modules_are_files_of_their_own(tmp_path):
    """transformers reads model.safetensors and meets no name that it does not know."""
    model = hardened(replace(SMALL, num_nextn_predict_layers=2))
    save_pretrained(model, tmp_path / "model")
    main = load_file(tmp_path / "model" / "model.safetensors")
    mtp = load_file(tmp_path / "model" / "mtp.safetensors")
    assert {name.split(".")[2] for name in mtp} == {"3", "4"}
    assert not {name for name in main if name.startswith(("model.layers.3", "model.layers.4"))}
    for layer in (3, 4):
        assert mtp[f"model.layers.{layer}.embed_tokens.weight"].equal(model.embed_tokens.weight)
        assert mtp[f"model.layers.{layer}.shared_head.head.weight"].equal(model.lm_head.weight)
        norm = model.mtp[layer - 3].norm.weight
        assert mtp[f"model.layers.{layer}.shared_head.norm.weight"].equal(norm)


def test_a_single_file_needs_no_index(tmp_path):
    save_pretrained(hardened(CONFIGS["no MTP module"]), tmp_path / "model")
    written = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert written == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("count", [0, 1])
def test_the_index_names_every_tensor(tmp_path, count):
    model = hardened(replace(SMALL, num_nextn_predict_layers=count))
    folder = tmp_path / "model"
    save_pretrained(model, folder, max_shard_bytes=20_000)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    tensors = tensors_in(folder)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as shard:
            assert name in shard.keys()  # noqa: SIM118
            assert shard.metadata() == {"format": "pt"}
    for file in set(index["weight_map"].values()):
        held = load_file(folder / file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 20_000
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (folder / MAIN_INDEX).exists() == bool(count)
    assert config.get("transformers_weights") == (MAIN_INDEX if count else None)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_shards_hold_everything_in_order_and_not_too_much(sizes, largest):
    assert fill_shards({"a": 3, "b": 4, "c": 1, "d": 9}, 7) == [["a", "b"], ["c"], ["d"]]
    named = {f"t{number}": size for number, size in enumerate(sizes)}
    shards = fill_shards(named, largest)
    assert [name for shard in shards for name in shard] == list(named)
    for shard in shards:
        assert sum(named[name] for name in shard) <= largest or len(shard) == 1
    for one, two in pairwise(shards):  # the next one would not have fitted
        assert sum(named[name] for name in one) + named[two[0]] > largest


def test_the_configuration_says_what_others_ask_for():
    yarn = YarnConfig()
    values = published_config(replace(SMALL, rope_scaling=yarn), torch.bfloat16, 7)
    assert values["architectures"] == ["DeepseekV3ForCausalLM"]
    assert values["model_type"] == "deepseek_v3"
    assert values["torch_dtype"] == "bfloat16"
    assert values["rope_scaling"]["type"] == "yarn"
    assert values["rope_scaling"]["factor"] == 40
    assert values["num_key_value_heads"] == SMALL.num_attention_heads
    assert (values["scoring_func"], values["topk_method"]) == ("sigmoid", "noaux_tc")
    assert values["bos_token_id"] == values["eos_token_id"] == 7
    assert published_config(SMALL, torch.float32, None)["rope_scaling"] is None
    assert published_config(SMALL, torch.float32, None)["eos_token_id"] is None


# --- all or nothing -------------------------------------------------------------------------------


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(HubError, match="not empty: choose another"):
        save_pretrained(hardened(SMALL), tmp_path)
    with pytest.raises(HubError, match="is a file: choose another"):
        save_pretrained(hardened(SMALL), tmp_path / "mine.txt")
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "model").mkdir()
    save_pretrained(hardened(SMALL), tmp_path / "model")
    assert from_pretrained(tmp_path / "model").config == SMALL
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
@pytest.mark.parametrize("made", [True, False])
def test_a_link_leads_to_the_folder_that_is_written(tmp_path, made):
    if made:
        (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk")
    save_pretrained(hardened(SMALL), tmp_path / "model")
    assert (tmp_path / "model").is_symlink()
    assert from_pretrained(tmp_path / "model").config == SMALL
    assert sorted(os.listdir(tmp_path)) == ["disk", "model"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_whoever_may_read_one_file_may_read_all(tmp_path):
    save_pretrained(hardened(SMALL), tmp_path / "model")
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(tmp_path, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("mdsd.model.hub.write_json", fail)
    expected = HubError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="cannot write .*No space" if expected is HubError else None):
        save_pretrained(hardened(SMALL), tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_what_a_killed_export_left_is_cleared(tmp_path):
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "half.safetensors").touch()
    with new_folder(tmp_path / "model") as partial:
        (partial / "a").touch()
    assert os.listdir(tmp_path / "model") == ["a"]
    assert os.listdir(tmp_path) == ["model"]


# --- FP8 blocks -----------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16), st.integers(0, 2**31))
def test_each_block_is_multiplied_by_its_scale(rows, columns, block, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(ceil(rows / block), ceil(columns / block), generator=generator) + 0.01
    result = dequantize_blocks(weight, scales, block)
    assert result.dtype == torch.float32
    for i in range(rows):
        for j in range(columns):
            assert result[i, j] == weight[i, j].float() * scales[i // block, j // block]


def test_stacked_weights_have_stacked_scales():
    weight = torch.randn(3, 200, 130).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 2)
    result = dequantize_blocks(weight, scales)
    for part, w, s in zip(result, weight, scales, strict=True):
        assert part.equal(dequantize_blocks(w, s))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (3, 2), (2, 2, 1), (2,)])
def test_scales_of_another_number_of_blocks_are_refused(shape):
    weight = torch.zeros(130, 250).to(torch.float8_e4m3fn)
    with pytest.raises(HubError, match=r"need scales \(2, 2\)"):
        dequantize_blocks(weight, torch.ones(shape))
