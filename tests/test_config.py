"""Configurations: what is refused, and what a published file becomes."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mdsd.config import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    BUILT_ONE_WAY,
    NEVER_GUESSED,
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
    with pytest.raises(ConfigError, match=r"'huge'.*tiny, mini, deepseek-v2-lite, .*deepseek-v3"):
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
@pytest.mark.parametrize(
    "value",
    [0, -0.5, float("nan"), float("inf"), pytest.param(10**400, id="huge"), "1", None, True, [1]],
)
def test_factors_are_above_zero(name: str, value: object):
    with pytest.raises(ConfigError, match=f"^{name} is {re.escape(repr(value))}; .*greater than 0"):
        dataclasses.replace(V3, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 63}, "make it even"),
        ({"n_group": 7}, r"n_routed_experts \(256\) must be a multiple of n_group \(7\)"),
        ({"topk_group": 9}, r"topk_group \(9\) exceeds n_group \(8\)"),
        ({"n_group": 256, "topk_group": 8}, "a group's score needs two"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, "leaves only 32 experts"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(V3, **changes)


YARN_NUMBERS = "factor beta_fast beta_slow mscale mscale_all_dim".split()


@pytest.mark.parametrize("name", [*YARN_NUMBERS, "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "40", None, True, [40]])
def test_a_number_of_yarn_is_named_with_its_place(name: str, value: object):
    with pytest.raises(ConfigError, match=f"^rope_scaling.{name} is {re.escape(repr(value))}; "):
        dataclasses.replace(V3, rope_scaling=YarnConfig(**{name: value}))


def test_yarn_stretches_and_never_shrinks():
    dataclasses.replace(V3, rope_scaling=YarnConfig(factor=1, mscale=0, mscale_all_dim=0))
    with pytest.raises(ConfigError, match=r"^rope_scaling.factor is 0.5; .* at least 1"):
        dataclasses.replace(V3, rope_scaling=YarnConfig(factor=0.5))
    with pytest.raises(ConfigError, match=r"^rope_scaling.beta_slow is 0"):
        dataclasses.replace(V3, rope_scaling=YarnConfig(beta_slow=0))
    with pytest.raises(ConfigError, match=r"^rope_scaling is \{'factor': 4\}; .* YarnConfig"):
        dataclasses.replace(V3, rope_scaling={"factor": 4})


@pytest.mark.parametrize("value", [1, "true", None])
def test_a_switch_is_true_or_false(value: object):
    with pytest.raises(ConfigError, match=f"^norm_topk_prob is {value!r}; .* True or False"):
        dataclasses.replace(V3, norm_topk_prob=value)


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


@pytest.mark.parametrize("name", sorted(NEVER_GUESSED))
def test_a_file_that_leaves_a_number_to_be_guessed_is_refused(name: str):
    """Also where we have a default: Hugging Face's may be another (eight groups, not one)."""
    with pytest.raises(ConfigError, match=f": {name} missing"):
        from_dict({field: value for field, value in PUBLISHED.items() if field != name})


def test_every_other_default_is_hugging_faces():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.DeepseekV3Config().to_dict()
    ours = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    guessed = set(ours) - NEVER_GUESSED - {"rope_theta", "rope_scaling"}
    guessed.remove("num_nextn_predict_layers")  # a file without it has no such weights
    assert {name: ours[name] for name in guessed} == {name: theirs[name] for name in guessed}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "7168"),
        ("hidden_size", None),
        ("hidden_size", [7168]),
        ("hidden_size", {"value": 7168}),
        ("n_routed_experts", 256.0),
        ("q_lora_rank", "1536"),
        ("n_shared_experts", None),
        ("rms_norm_eps", float("nan")),
        ("routed_scaling_factor", "2.5"),
        ("rope_theta", None),
        ("norm_topk_prob", "true"),
        ("rope_scaling", "yarn"),
        ("rope_scaling", [40]),
        ("rope_parameters", [40]),
    ],
)
def test_a_value_of_another_type_is_named(name: str, value: object):
    with pytest.raises(ConfigError, match=f"^{name} is {re.escape(repr(value))}"):
        from_dict(PUBLISHED | {name: value})


@pytest.mark.parametrize("values", [None, [], "{}", 7])
def test_what_is_no_object_is_no_configuration(values: object):
    with pytest.raises(ConfigError, match="an object with fields"):
        from_dict(values)


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


def test_missing_mscales_are_zero():
    scaling = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024}
    assert from_dict(PUBLISHED | {"rope_scaling": scaling}).rope_scaling == YarnConfig(
        factor=4, original_max_position_embeddings=1024, mscale=0.0, mscale_all_dim=0.0
    )


@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
def test_yarn_says_how_far_it_stretches(name: str):
    scaling = {key: value for key, value in PUBLISHED["rope_scaling"].items() if key != name}
    with pytest.raises(ConfigError, match=f"^rope_scaling.{name} is missing"):
        from_dict(PUBLISHED | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention_factor", 1.2), ("truncate", False), ("partial_rotary_factor", 0.5)],
)
def test_a_way_of_stretching_that_is_not_built_is_named(name: str, value: object):
    scaling = PUBLISHED["rope_scaling"] | {name: value}
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; only"):
        from_dict(PUBLISHED | {"rope_scaling": scaling})


def test_another_stretching_is_refused():
    for kind in ("linear", None):
        scaling = PUBLISHED["rope_scaling"] | {"type": kind}
        with pytest.raises(ConfigError, match=f"rope_scaling is of type {kind!r}"):
            from_dict(PUBLISHED | {"rope_scaling": scaling})


MOONLIGHT_FILE = json.loads("""{
  "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163586, "ep_size": 1,
  "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
  "initializer_range": 0.02, "intermediate_size": 11264, "kv_lora_rank": 512,
  "max_position_embeddings": 8192, "model_type": "deepseek_v3", "moe_intermediate_size": 1408,
  "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
  "norm_topk_prob": true, "num_attention_heads": 16, "num_experts_per_tok": 6,
  "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
  "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446,
  "scoring_func": "sigmoid", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1,
  "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128,
  "vocab_size": 163840}""")
V2_FILE = PUBLISHED | json.loads("""{
  "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288,
  "model_type": "deepseek_v2", "moe_intermediate_size": 1536, "n_routed_experts": 160,
  "n_shared_experts": 2, "norm_topk_prob": false, "num_experts_per_tok": 6,
  "num_hidden_layers": 60, "num_nextn_predict_layers": 0, "rope_scaling": {"beta_fast": 32,
    "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "type": "yarn"},
  "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_group": 3,
  "topk_method": "group_limited_greedy", "vocab_size": 102400}""")
V2_LITE_FILE = V2_FILE | json.loads("""{
  "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
  "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27,
  "num_key_value_heads": 16, "q_lora_rank": null, "routed_scaling_factor": 1.0, "topk_group": 1,
  "topk_method": "greedy"}""")


def test_moonlights_file_is_the_preset():
    assert from_dict(MOONLIGHT_FILE) == preset("moonlight-16b-a3b")


@pytest.mark.parametrize(
    ("values", "name"), [(V2_FILE, "deepseek-v2"), (V2_LITE_FILE, "deepseek-v2-lite")]
)
def test_v2_is_counted_only_by_whoever_asks_for_it(values: dict[str, object], name: str):
    """V2's gate is another one: its file is refused until each difference has been replaced."""
    for field in ("model_type", "scoring_func", "topk_method"):
        with pytest.raises(ConfigError, match=f"^{field} is {values[field]!r}"):
            from_dict(values)
        values = values | {field: BUILT_ONE_WAY[field]}
    assert from_dict(values) == preset(name)


@pytest.mark.parametrize("file", [{}, PUBLISHED, MOONLIGHT_FILE], ids=["own", "v3", "moonlight"])
def test_a_file_written_by_transformers_is_read(file: dict[str, object], tmp_path: Path):
    """Both as it is in memory and as version 5 of `transformers` writes it to disk."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.DeepseekV3Config(**file)
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    plain = {"max_position_embeddings": 4096, "rope_scaling": None, "initializer_range": 0.02}
    expected = from_dict(file) if file else dataclasses.replace(V3, **plain)
    assert from_dict(written) == from_dict(theirs.to_dict()) == expected
