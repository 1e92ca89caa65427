"""Reading what others wrote: every form of the format, and an error that names what is wrong."""

import json
import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_hub import SMALL, assert_same, hardened, state_of
from torch import Tensor

from mdsd.model.hub import INDEX, HubError, dequantize_blocks, save_pretrained
from mdsd.model.published import Weights, few, from_pretrained, save_run
from mdsd.model.transformer import MiniDeepSeek
from mdsd.training.checkpoint import load_run
from mdsd.training.tokenizer import gpt2_tokenizer

Tensors = dict[str, Tensor]
GATE = "model.layers.1.mlp.gate.weight"
EXPERTS = "model.layers.1.mlp.experts."
QUERY = "model.layers.0.self_attn.q_a_proj.weight"


@pytest.fixture(scope="module")
def model() -> MiniDeepSeek:
    return hardened(SMALL)


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """Return a folder as others write it: one file with everything."""
    path = tmp_path / "model"
    save_pretrained(model, path)
    tensors = load_file(path / "model.safetensors") | load_file(path / "mtp.safetensors")
    (path / "mtp.safetensors").unlink()
    (path / INDEX).unlink()
    save_file(tensors, path / "model.safetensors")
    return path


def change(folder: Path, how: Callable[[Tensors], object]) -> None:
    """Rewrite the weights after `how` has changed their dictionary."""
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **values: object) -> None:
    """Change fields of config.json; `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | values
    config = {name: value for name, value in config.items() if value is not ...}
    path.write_text(json.dumps(config), encoding="utf-8")


def in_shards(folder: Path, *groups: Tensors, **more: object) -> None:
    """Write each group of tensors as a shard, and an index; `more` goes into its weight_map."""
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, object] = {}
    for number, tensors in enumerate(groups):
        save_file(tensors, folder / f"shard-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"shard-{number}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map | more}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def halves(folder: Path) -> tuple[Tensors, Tensors]:
    """Return the tensors dealt out in turn, as scales may lie in another shard than weights."""
    items = sorted(load_file(folder / "model.safetensors").items())
    return dict(items[::2]), dict(items[1::2])


def refused(folder: Path) -> str:
    """Return what the error says, on one line, when the folder is read."""
    with pytest.raises(HubError) as refusal:
        from_pretrained(folder)
    told = str(refusal.value)
    assert "\n" not in told
    assert len(told) < 700
    return told


# --- the forms it comes in ------------------------------------------------------------------------


def test_one_file_and_shards(model, folder):
    assert_same(state_of(model), state_of(from_pretrained(folder)))
    in_shards(folder, *halves(folder))
    assert_same(state_of(model), state_of(from_pretrained(folder)))


def fuse(tensors: Tensors) -> None:
    """Store layer 1's experts as transformers has them in memory."""
    parts = [
        [tensors.pop(f"{EXPERTS}{expert}.{name}_proj.weight") for expert in range(8)]
        for name in ("gate", "up", "down")
    ]
    gate, up, down = map(torch.stack, parts)
    tensors[EXPERTS + "gate_up_proj"] = torch.cat([gate, up], dim=1)
    tensors[EXPERTS + "down_proj"] = down


def test_experts_may_be_fused_in_some_layers(model, folder):
    change(folder, fuse)
    assert_same(state_of(model), state_of(from_pretrained(folder)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_without_loss(model, folder, dtype):
    change(folder, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    wide, narrow = from_pretrained(folder), from_pretrained(folder, dtype)
    assert_same(state_of(narrow), state_of(wide))
    for name, tensor in state_of(model).items():
        assert state_of(wide)[name].equal(tensor.to(dtype).float()), name
    assert narrow.lm_head.weight.dtype == dtype
    assert narrow.gates()[0].e_score_correction_bias.dtype == torch.float32


def quantize(tensors: Tensors, block: int) -> Tensors:
    """Store the matrices that [V3] has in FP8 in blocks; return what they are worth."""
    worth = {}
    for name in sorted(tensors):
        kept = ("embed_tokens", "head", "mlp.gate.", "norm", "eh_proj", "bias")
        if any(part in name for part in kept):
            continue
        weight = tensors[name]
        rows, columns = (-(-size // block) for size in weight.shape)
        scale = torch.rand(rows, columns) + 0.5
        tensors[name] = (weight * 3).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scale
        worth[name] = dequantize_blocks(tensors[name], scale, block)
    return worth


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("block", [128, 16, 7])  # 7 leaves ragged blocks everywhere
def test_fp8_weights_are_multiplied_by_their_scales(folder, block, sharded):
    worth: Tensors = {}
    change(folder, lambda tensors: worth.update(quantize(tensors, block)))
    configure(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [block] * 2})
    if sharded:  # no scale beside its weight
        in_shards(folder, *halves(folder))
    state = state_of(from_pretrained(folder))
    assert state["layers.0.self_attn.q_a_proj.weight"].equal(worth[QUERY])
    for expert in range(8):
        gate, up, down = (
            worth[f"{EXPERTS}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        stack = state["layers.1.mlp.experts.gate_up_proj"][expert]
        assert stack.equal(torch.cat([gate, up]))
        assert state["layers.1.mlp.experts.down_proj"][expert].equal(down)
    assert state["mtp.0.block.self_attn.o_proj.weight"].equal(
        worth["model.layers.3.self_attn.o_proj.weight"]
    )


def test_fp8_blocks_are_128_wide_unless_the_configuration_says_otherwise(folder):
    change(folder, lambda tensors: quantize(tensors, 128))
    from_pretrained(folder)
    change(folder, lambda tensors: tensors.update({QUERY + "_scale_inv": torch.ones(2, 1)}))
    assert f"{QUERY}: weights (20, 32) in blocks of 128 need scales (1, 1)" in refused(folder)


def without_mtp(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        del tensors[name]


def test_configured_mtp_modules_may_be_absent(model, folder):
    change(folder, without_mtp)
    with pytest.warns(UserWarning, match="0 of 1 configured MTP modules are there"):
        back = from_pretrained(folder)
    assert back.config == replace(SMALL, num_nextn_predict_layers=0)
    main = {name: x for name, x in state_of(model).items() if not name.startswith("mtp.")}
    assert_same(main, state_of(back))


def test_more_mtp_modules_than_configured_are_passed_over(model, folder):
    configure(folder, num_nextn_predict_layers=0)
    back = from_pretrained(folder)
    assert len(back.mtp) == 0
    assert back.norm.weight.equal(model.norm.weight)


def test_mtp_modules_need_not_repeat_what_they_share(model, folder):
    change(folder, lambda tensors: tensors.pop("model.layers.3.embed_tokens.weight"))
    change(folder, lambda tensors: tensors.pop("model.layers.3.shared_head.head.weight"))
    assert_same(state_of(model), state_of(from_pretrained(folder)))


def test_old_rotary_buffers_are_passed_over(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda tensors: tensors.update({name: torch.ones(2)}))
    from_pretrained(folder)


# --- what is wrong with it ------------------------------------------------------------------------


def test_a_missing_tensor_is_named(folder):
    change(folder, lambda tensors: tensors.pop(GATE))
    assert f"lacks {GATE}: fetch" in refused(folder)


def test_many_missing_tensors_are_counted(folder):
    change(folder, lambda tensors: [tensors.pop(f"{EXPERTS}{e}.up_proj.weight") for e in range(8)])
    told = refused(folder)
    assert told.count("up_proj") == 5
    assert "and 3 more" in told
    assert few("abcdef") == "a, b, c, d, e and 1 more"
    assert few("ba") == "a, b"


def test_half_an_mtp_module_is_missing_the_other_half(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"))
    assert "lacks model.layers.3.eh_proj.weight" in refused(folder)


@pytest.mark.filterwarnings("ignore:.*MTP modules")
def test_a_second_mtp_module_without_the_first(folder):
    change(folder, without_mtp)
    configure(folder, num_nextn_predict_layers=2)
    change(folder, lambda t: t.update({"model.layers.4.enorm.weight": torch.ones(32)}))
    assert "lacks model.layers.3." in refused(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.3.mlp.bias",
        "model.layers.4.mlp.gate.weight",  # no MTP module: it has no enorm
        "extra",
        f"{EXPERTS}8.up_proj.weight",
        f"{GATE}_scale_inv",  # of a weight that is not FP8
    ],
)
def test_a_surplus_tensor_is_named(folder, name):
    change(folder, lambda tensors: tensors.update({name: torch.ones(3)}))
    assert f"no place for {name}:" in refused(folder)


def test_experts_both_fused_and_separate(folder):
    separate = load_file(folder / "model.safetensors")
    change(folder, fuse)
    one = f"{EXPERTS}0.up_proj.weight"
    change(folder, lambda tensors: tensors.update({one: separate[one]}))
    assert f"no place for {one}" in refused(folder)


def test_a_layer_too_many_is_no_mtp_module(folder):
    configure(folder, num_hidden_layers=2)
    assert "lacks model.layers.2.eh_proj.weight" in refused(folder)


@pytest.mark.parametrize("shape", [(20, 31), (32, 20), (640,), (20, 32, 1), (0,)])
def test_a_misshapen_tensor_is_named(folder, shape):
    change(folder, lambda tensors: tensors.update({QUERY: torch.ones(shape)}))
    assert f"{QUERY} {shape}, not (20, 32)" in refused(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.bool])
def test_another_dtype_is_named(folder, dtype):
    change(folder, lambda tensors: tensors.update({QUERY: torch.ones(20, 32).to(dtype)}))
    assert f"{QUERY} of dtype" in refused(folder)


def test_fp8_without_scales(folder):
    eight = torch.ones(20, 32).to(torch.float8_e4m3fn)
    change(folder, lambda tensors: tensors.update({QUERY: eight}))
    assert f"{QUERY} in FP8 without weight_scale_inv" in refused(folder)


def test_an_mtp_module_with_an_embedding_of_its_own(folder):
    name = "model.layers.3.embed_tokens.weight"
    change(folder, lambda tensors: tensors[name].add_(1))
    assert f"{name} differs from embed_tokens.weight" in refused(folder)


CONFIGURATIONS = {
    "another model": ({"model_type": "llama"}, "model_type is 'llama'"),
    "no model type": ({"model_type": ...}, "model_type is None"),
    "V2's scores": ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    "unknown scores": ({"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
    "unknown choice": ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
    "unknown stretching": ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "without heads": ({"num_attention_heads": ...}, "num_attention_heads"),
    "half a head": ({"num_attention_heads": 0.5}, "num_attention_heads is 0.5"),
    "other bits": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "flat blocks": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
        "square blocks",
    ),
    "no settings": ({"quantization_config": "fp8"}, "quantization_config"),
    "no blocks": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128"}},
        "square blocks",
    ),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_configuration_that_cannot_be_built_is_explained(folder, case):
    values, words = CONFIGURATIONS[case]
    configure(folder, **values)
    told = refused(folder)
    assert words in told
    assert "config" in told


ODD = [None, "x", -1, 0, [], [1], {}, {"type": "yarn"}, True, 1e308, float("nan"), 3.5, ...]


def test_no_odd_value_of_the_configuration_gets_through_as_another_error(folder, monkeypatch):
    monkeypatch.setattr("mdsd.model.published.fill", lambda *_: None)  # only what comes before
    names = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in [*names, "quantization_config", "rope_parameters"]:
        before = (folder / "config.json").read_text(encoding="utf-8")
        for value in ODD:
            configure(folder, **{name: value})
            with suppress(HubError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from_pretrained(folder)
            (folder / "config.json").write_text(before, encoding="utf-8")


@pytest.mark.parametrize("text", ["{", "", "[1]", "null", "\x80"])
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_file_that_is_no_json_object(folder, name, text):
    (folder / name).write_bytes(text.encode("latin-1"))
    assert str(folder / name) in refused(folder)


def test_missing_files(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors and no model.safetensors.index.json" in refused(folder)
    (folder / "config.json").unlink()
    assert "holds no config.json" in refused(folder)
    assert "holds no config.json" in refused(tmp_path / "nowhere")


class Exploding:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("exploded",))


def test_pickled_weights_are_refused_and_not_opened(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Exploding(), folder / "pytorch_model.bin")
    from_pretrained(folder)  # safetensors are there: nobody looks at the other
    (folder / "model.safetensors").unlink()
    assert "pytorch_model.bin is pickled and could run code" in refused(folder)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("rest", [0, 7, 100, -4])
def test_a_file_that_is_cut_off(folder, rest):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:rest])
    assert f"{path} is damaged or cut off" in refused(folder)


def test_a_shard_that_is_not_there(folder):
    one, two = halves(folder)
    in_shards(folder, one, two)
    (folder / "shard-1.safetensors").unlink()
    assert "lacks shard-1.safetensors, which model.safetensors.index.json names" in refused(folder)


def test_a_tensor_in_two_shards(folder):
    one, two = halves(folder)
    in_shards(folder, one, two | one, **dict.fromkeys(one, "shard-0.safetensors"))
    told = refused(folder)
    assert "shard-1.safetensors and shard-0.safetensors both hold lm_head.weight" in told
    assert "more: keep one of them" in told


def test_an_index_that_is_wrong_about_a_tensor(folder):
    one, two = halves(folder)
    in_shards(folder, one, two, **{min(two): "shard-0.safetensors"})
    assert f"names a file for {min(two)} that does not hold it:" in refused(folder)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", "sub/x", "..", "", "a\\b", "a\0b", 7, None, ["x"]],
)
def test_an_index_that_leads_out_of_the_folder(folder, name):
    (folder.parent / "x.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    in_shards(folder, *halves(folder), **{GATE: name})
    assert "outside of the folder" in refused(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_a_map(folder, index):
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert "has no weight_map" in refused(folder)


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    in_shards(folder, *halves(folder))
    (folder / "shard-1.safetensors").rename(tmp_path / "elsewhere")
    (folder / "shard-1.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "'shard-1.safetensors', which is outside of the folder" in refused(folder)
    (folder / "shard-1.safetensors").unlink()
    (folder / "shard-1.safetensors").symlink_to("shard-1.safetensors")
    assert "lacks shard-1.safetensors" in refused(folder)


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_a_single_file_is_held_to_the_same(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "'model.safetensors', which is outside of the folder" in refused(folder)


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_the_hubs_cache_keeps_files_as_links(model, folder, tmp_path):
    in_shards(folder, *halves(folder))
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(blobs / f"{path.name}-hash")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{path.name}-hash")
    assert_same(state_of(model), state_of(from_pretrained(snapshot)))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(folder, number):
    change(folder, lambda tensors: tensors["model.norm.weight"].fill_(number))
    assert "model.norm.weight holds numbers that are not finite" in refused(folder)


def test_a_configuration_nested_too_deeply(folder):
    (folder / "config.json").write_text("[" * 200_000, encoding="utf-8")
    assert "cannot read" in refused(folder)


# --- how it is read -------------------------------------------------------------------------------


def test_one_tensor_at_a_time(folder, monkeypatch):
    alive: list[weakref.ref[Tensor]] = []
    read = Weights.read

    def watched(self: Weights, name: str) -> Tensor:
        assert not any(reference() is not None for reference in alive), "two at a time"
        tensor = read(self, name)
        alive[:] = [weakref.ref(tensor)]
        return tensor

    monkeypatch.setattr(Weights, "read", watched)
    from_pretrained(folder)
    assert alive


def test_shapes_are_checked_before_memory_is_asked_for(folder, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("memory for a model that does not fit")

    monkeypatch.setattr(MiniDeepSeek, "to_empty", never)
    configure(folder, vocab_size=70)
    assert "lm_head.weight (61, 32), not (70, 32)" in refused(folder)


@pytest.mark.parametrize("number", [10**9, 2**70])
@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "num_nextn_predict_layers", "n_routed_experts", "vocab_size"]
)
def test_a_configuration_of_a_giant_is_refused_at_once(folder, name, number):
    configure(folder, **{name: 4 * number})
    assert "far fewer than its config.json describes" in refused(folder)


def test_files_are_closed(folder):
    from_pretrained(folder)
    change(folder, lambda tensors: tensors.pop(GATE))
    refused(folder)
    (folder / "model.safetensors").unlink()  # Windows refuses this for an open file


def test_a_run_of_imported_weights_tells_stories(tmp_path):
    model, tokenizer = hardened(replace(SMALL, vocab_size=50_257)), gpt2_tokenizer()
    save_run(model, tokenizer, tmp_path / "run")
    back, same = load_run(tmp_path / "run")
    assert_same(state_of(model), state_of(back))
    assert same.to_meta() == tokenizer.to_meta()
    with pytest.raises(HubError, match="not empty"):
        save_run(model, tokenizer, tmp_path / "run")
