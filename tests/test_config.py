"""Configurations: what is refused, what is counted, and what a published file becomes."""

import dataclasses
import json

import pytest

from mdsd.config import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    BUILT_ONE_WAY,
    PRESETS,
    ConfigError,
    MdsdError,
    ModelConfig,
    YarnConfig,
    from_dict,
    preset,
    to_dict,
)

V3 = preset("deepseek-v3")

# DeepSeek-V3's own config.json, without what describes the software that wrote it.
PUBLISHED = json.loads("""{
  "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
  "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
  "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
  "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
  "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
  "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
  "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
  "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": true,
  "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
  "vocab_size": 129280}""")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_json(name: str):
    assert from_dict(json.loads(json.dumps(to_dict(preset(name))))) == preset(name)


def test_preset_changes_and_refuses():
    assert preset("tiny", hidden_size=96) == dataclasses.replace(PRESETS["tiny"], hidden_size=96)
    with pytest.raises(ConfigError, match=r"'huge'.*tiny, mini, deepseek-v2-lite, deepseek-v3"):
        preset("huge")
    with pytest.raises(ConfigError, match="hiden_size"):
        preset("tiny", hiden_size=96)
    assert issubclass(ConfigError, MdsdError)


def test_a_configuration_is_a_value():
    assert hash(preset("tiny")) == hash(dataclasses.replace(preset("tiny")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("tiny").hidden_size = 1  # type: ignore[misc]


def test_every_number_is_checked():
    """A field that is added later must be put into one of the lists or be named here."""
    checked = {*AT_LEAST_ONE, *AT_LEAST_ZERO, *ABOVE_ZERO}
    unchecked = {field.name for field in dataclasses.fields(ModelConfig)} - checked
    assert unchecked == {"q_lora_rank", "norm_topk_prob", "rope_scaling"}


@pytest.mark.parametrize("name", [*AT_LEAST_ONE, "q_lora_rank"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "7", True, float("nan")])
def test_widths_and_counts_are_whole_and_positive(name: str, value: object):
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; .*whole number, at least 1"):
        dataclasses.replace(V3, **{name: value})


@pytest.mark.parametrize("name", AT_LEAST_ZERO)
def test_depths_may_be_zero_but_not_less(name: str):
    dataclasses.replace(V3, **{name: 0})
    with pytest.raises(ConfigError, match=f"^{name} is -1"):
        dataclasses.replace(V3, **{name: -1})


@pytest.mark.parametrize("name", ABOVE_ZERO)
@pytest.mark.parametrize("value", [0, -0.5, float("nan"), "1", None])
def test_factors_are_above_zero(name: str, value: object):
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; .*greater than 0"):
        dataclasses.replace(V3, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 63}, "make it even"),
        ({"n_group": 7}, r"n_routed_experts \(256\) must be a multiple of n_group \(7\)"),
        ({"topk_group": 9}, r"topk_group \(9\) exceeds n_group \(8\)"),
        ({"n_group": 256, "topk_group": 8}, "a group's score needs two"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, "leaves only 32 experts"),
        ({"rope_scaling": YarnConfig(factor=0.5)}, "factor is 0.5"),
        ({"rope_scaling": YarnConfig(beta_slow=0)}, "beta_slow is 0"),
        (
            {"rope_scaling": YarnConfig(original_max_position_embeddings=0)},
            "original_max_position_embeddings is 0",
        ),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(V3, **changes)


def test_limits_themselves_are_allowed():
    dataclasses.replace(V3, topk_group=1, num_experts_per_tok=32)
    dataclasses.replace(V3, n_group=1, topk_group=1, n_routed_experts=1, num_experts_per_tok=1)
    dataclasses.replace(V3, n_group=128, topk_group=128)


def test_the_published_file_is_the_preset():
    # The file names Hugging Face's default spread, the preset that of the report.
    assert from_dict(PUBLISHED) == dataclasses.replace(V3, initializer_range=0.02)


@pytest.mark.parametrize("name", BUILT_ONE_WAY)
def test_another_model_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"^{name} is 'other'"):
        from_dict(PUBLISHED | {name: "other"})


def test_an_incomplete_file_is_refused():
    with pytest.raises(ConfigError, match="hidden_size"):
        from_dict({name: value for name, value in PUBLISHED.items() if name != "hidden_size"})
    with pytest.raises(ConfigError, match="hidden_size is '7168'"):
        from_dict(PUBLISHED | {"hidden_size": "7168"})


def test_yarn_is_read_in_either_form():
    scaling = PUBLISHED["rope_scaling"]
    plain = {name: value for name, value in PUBLISHED.items() if not name.startswith("rope")}
    newer = plain | {"rope_parameters": scaling | {"rope_type": "yarn", "rope_theta": 5e5}}
    assert from_dict(newer).rope_theta == 5e5
    assert from_dict(newer).rope_scaling == YarnConfig()
    default = plain | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert from_dict(default).rope_theta == 5e5
    assert from_dict(default).rope_scaling is None
    assert from_dict(plain).rope_theta == 10_000
    assert from_dict(PUBLISHED | {"rope_scaling": None}).rope_scaling is None


def test_a_missing_mscale_all_dim_is_zero():
    scaling = {"type": "yarn", "factor": 4}
    assert from_dict(PUBLISHED | {"rope_scaling": scaling}).rope_scaling == YarnConfig(
        factor=4, mscale_all_dim=0.0
    )


def test_another_stretching_is_refused():
    with pytest.raises(ConfigError, match="type 'linear'"):
        from_dict(PUBLISHED | {"rope_scaling": {"type": "linear", "factor": 4}})


def test_a_file_written_by_transformers_is_read():
    transformers = pytest.importorskip("transformers")
    values = transformers.DeepseekV3Config().to_dict()
    expected = dataclasses.replace(
        V3, initializer_range=0.02, max_position_embeddings=4096, rope_scaling=None
    )
    assert from_dict(values) == expected
