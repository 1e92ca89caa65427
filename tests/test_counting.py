"""Shapes and counts: closed formulas, and the sizes that the papers publish."""

from math import prod

import pytest

from mdsd.config import PRESETS, preset
from mdsd.counting import count_parameters, parameter_shapes


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("deepseek-v3", (671_026_404_352, 37_552_282_624, 11_610_067_968)),
        ("deepseek-v2-lite", (15_706_484_224, 2_661_150_208, 0)),
    ],
)
def test_published_models_have_their_published_size(name: str, counts: tuple[int, int, int]):
    assert count_parameters(preset(name)) == counts


@pytest.mark.parametrize("name", PRESETS)
def test_counts_are_sums_over_shapes(name: str):
    config, shapes = preset(name), parameter_shapes(preset(name))
    count = count_parameters(config)
    assert count.total + count.mtp == sum(map(prod, shapes.values()))
    idle = config.n_routed_experts - config.num_experts_per_tok
    mixtures = config.num_hidden_layers - config.first_k_dense_replace
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    assert count.total - count.active == mixtures * idle * expert
