"""Rotary settings: every spelling of a config, and what a malformed one says. (What they mean: test_families.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lesonnx.errors import CheckpointError
from lesonnx_export.config import Config
from lesonnx_export.rope import inverse_frequencies, make_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def rope(**values: Any) -> Any:
    return make_rope(Config({"model_type": "x", "max_position_embeddings": 128} | values), 16, default_theta=10.0)


def test_theta_in_its_places() -> None:
    for values, theta in (
        ({"rope_theta": 5.0}, 5.0),
        ({"rope_parameters": {"rope_theta": 7, "rope_type": "default"}}, 7.0),
        ({}, 10.0),
        ({"rope_scaling": None, "rope_theta": 2}, 2.0),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 3}, 3.0),
    ):
        assert np.array_equal(rope(**values).inverse_frequencies, inverse_frequencies(theta, 16)), values


def test_transformers_4_and_5_say_the_same() -> None:
    new = rope(rope_parameters=YARN | {"rope_theta": 500.0})
    old = rope(rope_theta=500.0, rope_scaling={**YARN, "type": YARN["rope_type"]})
    assert new.key == old.key != rope(rope_theta=500.0).key
    without = {key: value for key, value in YARN.items() if key != "rope_type"}
    assert rope(rope_theta=500.0, rope_scaling={**without, "type": "yarn"}).key == new.key


def test_part_of_a_head() -> None:
    for values in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        assert rope(**values).rotary_dim == 8
    assert rope().rotary_dim == 16


def test_layers_of_a_kind_have_their_own() -> None:
    config = Config({"rope_parameters": {"full": {"rope_theta": 3.0}, "sliding": {"rope_theta": 4.0}}})
    for layer_type, theta in (("full", 3.0), ("sliding", 4.0)):
        found = make_rope(config, 16, default_theta=1.0, layer_type=layer_type)
        assert np.array_equal(found.inverse_frequencies, inverse_frequencies(theta, 16))


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"rope_type": "spiral"}, "rope_type 'spiral' is not one of default"),
        ({"rope_type": "linear"}, "factor must be a positive number, found None"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a positive number, found 0"),
        ({"rope_type": "linear", "factor": "4"}, "factor must be a positive number, found '4'"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor must be"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            "low_freq_factor 4.0 must be below high_freq_factor 1.0",
        ),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8}, "long_factor must be 8 numbers"),
        (
            {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 7, "long_factor": [1.0] * 8},
            "short_factor must be 8 numbers, found 7",
        ),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor leaves 0 of 16"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor leaves 32 of 16"),
        ({"rope_theta": True}, "rope_theta must be"),
    ],
)
def test_malformed_settings_are_named(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match="config.json") as caught:
        rope(rope_parameters=parameters)
    assert said in str(caught.value)
