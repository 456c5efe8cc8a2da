"""Makes tests/models/golden/: tiny random models in Hugging Face form, with the logits transformers computes for them.

    python tests/models/make_golden.py [VARIANT ...]

Needs torch and transformers, which the tests do not. Each variant is a folder of `config.json`, `model.safetensors` and
`expected.npz`, whose arrays are

    tokens         [2, 40]         int32    two random sequences
    logits         [2, 40, vocab]  float32  at every position, from one forward pass of both
    greedy         [2, 8]          int32    greedy continuation of each sequence
    greedy_logits  [2, 8, vocab]   float32  what each of those tokens was chosen from

Everything is float32 with eager attention. Weights are larger than an initializer's, so that logits are of order 1 to
10, attention is far from uniform, and a mistake in a scale, a rope frequency or a mask moves them by much more than the
tolerance.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

GOLDEN = Path(__file__).resolve().parent / "golden"
SEQUENCE_TOKENS = 40
GREEDY_TOKENS = 8
VOCAB_SIZE = 112


@dataclass(frozen=True)
class Variant:
    """A Hugging Face model family and the settings that make it test something."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    classic_config: bool = True  # `rope_theta` and `rope_scaling`, as most published models; else `rope_parameters`


BASE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
LLAMA3_SCALING = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,  # short, so that 40 positions reach well into the stretched range
)
VARIANTS = {
    "llama-mha": Variant("Llama"),
    "llama-gqa-tied": Variant("Llama", dict(num_key_value_heads=2, tie_word_embeddings=True), classic_config=False),
    "llama-mqa": Variant("Llama", dict(num_key_value_heads=1)),
    "llama-bias": Variant("Llama", dict(num_key_value_heads=2, attention_bias=True, mlp_bias=True)),
    "llama31-rope": Variant("Llama", dict(num_key_value_heads=2, rope_theta=500.0, rope_scaling=LLAMA3_SCALING)),
    "llama-linear-rope": Variant(
        "Llama", dict(rope_theta=2000.0, rope_scaling=dict(rope_type="linear", factor=4.0)), classic_config=False
    ),
    "llama-head-dim-24": Variant("Llama", dict(head_dim=24, num_attention_heads=3, num_key_value_heads=1)),
    "mistral-window": Variant("Mistral", dict(num_key_value_heads=2, sliding_window=8, head_dim=12)),
    "qwen2": Variant("Qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1000.0)),
    "qwen3": Variant("Qwen3", dict(num_key_value_heads=2, head_dim=20, rope_theta=5000.0)),
    "smollm2": Variant(
        "Llama",
        dict(
            hidden_size=54,
            intermediate_size=72,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            rope_theta=100000.0,
        ),
    ),
}


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Gives every parameter a value that matters: no bias is zero, no norm weight one."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 1.0 + 0.2 * noise
        elif parameter.ndim == 1:
            value = 0.3 * noise
        elif "embed" in name or "lm_head" in name:
            value = 0.5 * noise
        else:
            value = 1.5 * noise / parameter.shape[1] ** 0.5
        parameter.data.copy_(value)


def build(name: str, variant: Variant) -> torch.nn.Module:
    config_class = getattr(transformers, f"{variant.family}Config")
    config = config_class(**{**BASE, **variant.settings})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{variant.family}ForCausalLM")(config).to(torch.float32).eval()
    randomize(model, torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return model


@torch.no_grad()
def expected(model: torch.nn.Module, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits of whole forward passes; no cache takes part, so nothing but the model is tested."""
    sequences = torch.from_numpy(tokens).long()
    logits = model(sequences, use_cache=False).logits
    steps = []
    for _ in range(GREEDY_TOKENS):
        steps.append(model(sequences, use_cache=False).logits[:, -1])
        sequences = torch.cat([sequences, steps[-1].argmax(-1, keepdim=True)], dim=1)
    return {
        "tokens": tokens,
        "logits": logits.numpy().astype(np.float32),
        "greedy": sequences[:, -GREEDY_TOKENS:].numpy().astype(np.int32),
        "greedy_logits": torch.stack(steps, dim=1).numpy().astype(np.float32),
    }


def make_classic(path: Path) -> None:
    """Rewrites a config.json as transformers before version 5 did."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(name: str, variant: Variant) -> None:
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    model = build(name, variant)
    tokens = np.random.default_rng(zlib.crc32(name.encode())).integers(3, VOCAB_SIZE, (2, SEQUENCE_TOKENS))
    arrays = expected(model, tokens.astype(np.int32))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if variant.classic_config:
        make_classic(folder / "config.json")
    np.savez_compressed(folder / "expected.npz", **arrays)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    top = np.sort(arrays["greedy_logits"], axis=-1)
    print(
        f"{name:18} {size_bytes / 1000:6.0f} kB  std {arrays['logits'].std():.2f}  "
        f"max {np.abs(arrays['logits']).max():.1f}  smallest greedy gap {(top[..., -1] - top[..., -2]).min():.3f}  "
        f"{json.loads((folder / 'config.json').read_text())['architectures'][0]}"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    for chosen in sys.argv[1:] or VARIANTS:
        make(chosen, VARIANTS[chosen])
