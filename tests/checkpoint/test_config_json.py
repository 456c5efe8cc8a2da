"""Configurations as JSON: a round trip through text, and refusals that name the field."""

import dataclasses
import json
from typing import Any

import pytest

from jaxinfer.checkpoint.config_json import model_config_from_json, model_config_to_json
from jaxinfer.config import ModelConfig, RopeScaling

SMALL = ModelConfig("llama", 10, 8, 16, 2, 2, 1, 4, 32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": RopeScaling("frequencies", divisors=(1.0, 1.7, 0.1))},
        {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16), "sliding_windows": (0, 8), "qk_norm": True},
        {"bos_token_id": 1, "eos_token_ids": (2, 0), "norm_eps": 1e-6, "rope_theta": 5e5, "tie_embeddings": True},
    ],
)
def test_round_trip(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(SMALL, **changes)
    assert model_config_from_json(json.loads(json.dumps(model_config_to_json(config)))) == config


def test_whole_numbers_are_floats_where_floats_are_meant() -> None:
    config = model_config_from_json(model_config_to_json(SMALL) | {"rope_theta": 10000})
    assert config == SMALL and isinstance(config.rope_theta, float)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10.0}, "vocab_size is '10.0', not int"),
        ({"vocab_size": True}, "vocab_size is 'True', not int"),
        ({"tie_embeddings": 1}, "tie_embeddings is '1', not bool"),
        ({"architecture": None}, "architecture is 'None', not str"),
        ({"sliding_windows": 8}, r"sliding_windows is '8', not tuple\[int, ...\]"),
        ({"eos_token_ids": [1, "2"]}, "eos_token_ids is '2', not int"),
        ({"rope_scaling": "linear"}, r"rope_scaling is 'linear', not RopeScaling"),
        ({"rope_scaling": {}}, "rope_scaling: 'kind' is missing"),
        ({"rope_scaling": {"kind": "linear", "beta": 1}}, "rope_scaling: unknown field 'beta'"),
        ({"head_dim": 3}, "head_dim=3 must be even"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"model config: {message}"):
        model_config_from_json(model_config_to_json(SMALL) | changes)


def test_a_missing_field_is_named() -> None:
    data = model_config_to_json(SMALL)
    del data["embed_dim"]
    with pytest.raises(ValueError, match="model config: 'embed_dim' is missing"):
        model_config_from_json(data)
