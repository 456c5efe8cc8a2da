"""The Llama family: Llama 2/3/3.1, SmolLM2, Mistral (sliding window), Qwen2 (biases), Qwen3 (norms on q and k).

One module serves them all (`jaxinfer.models.decoder.Decoder`); here are their configurations, from a Hugging Face
`config.json` or a GGUF file's metadata, and the names under which each keeps its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig, RopeScaling
from jaxinfer.models.weights import Piece

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
IGNORABLE = (r".*rotary_emb\.inv_freq", r".*\.attention\.masked_bias", r"rope_freqs\.weight")
"""Tensors that files of the family carry and nothing needs: rotary tables and their like."""


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"model config: {key!r} is missing")
    return config[key]


def _as_tuple(ids: Any) -> tuple[int, ...]:
    return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def _rope_scaling_from_hf(config: Mapping[str, Any]) -> RopeScaling | None:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=float(_required(scaling, "factor")))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(_required(scaling, "factor")),
            low_freq_factor=float(_required(scaling, "low_freq_factor")),
            high_freq_factor=float(_required(scaling, "high_freq_factor")),
            original_max_position=int(_required(scaling, "original_max_position_embeddings")),
        )
    raise ValueError(f"model config: rope_scaling type {kind!r} is not supported (default, linear, llama3 are)")


def _windows_from_hf(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window")
    if not window or (family.startswith("qwen") and not config.get("use_sliding_window")):
        return ()
    kinds = config.get("layer_types")
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)
    full_below = int(config.get("max_window_layers", 0)) if family.startswith("qwen") else 0
    return tuple(int(window) if layer >= full_below else 0 for layer in range(num_layers))


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The shape of a model from its `config.json`.

    Raises:
        ValueError: a field that is missing, or one whose value this family's module does not honour.
    """
    family = HF_ARCHITECTURES[config["architectures"][0]]
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"model config: hidden_act={activation!r} is not supported (silu is)")
    num_heads, embed_dim = int(_required(config, "num_attention_heads")), int(_required(config, "hidden_size"))
    num_layers = int(_required(config, "num_hidden_layers"))
    rope = config.get("rope_parameters") or {}
    if rope:  # transformers 5 keeps base and scaling together
        config = {**config, "rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": rope}
    attention_bias = bool(config.get("attention_bias", family == "qwen2"))
    return ModelConfig(
        architecture=family,
        vocab_size=int(_required(config, "vocab_size")),
        embed_dim=embed_dim,
        ffn_dim=int(_required(config, "intermediate_size")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or embed_dim // num_heads),
        max_position=int(config.get("max_position_embeddings", 2048)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(config.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling_from_hf(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias and family != "qwen2",
        ffn_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        sliding_windows=_windows_from_hf(config, family, num_layers),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_as_tuple(config.get("eos_token_id")),
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The shape of a model from a GGUF file's key-values and tensor shapes (which tell biases and a tied head).

    Raises:
        ValueError: a key that is missing, or a rope scaling that is not supported.
    """
    family = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{family}.{key}", default)
        if value is None:
            raise ValueError(f"GGUF metadata: {family}.{key} is missing")
        return value

    num_heads, embed_dim = int(get("attention.head_count")), int(get("embedding_length"))
    num_layers = int(get("block_count"))
    head_dim = int(get("attention.key_length", embed_dim // num_heads))
    if int(get("attention.value_length", head_dim)) != head_dim:
        raise ValueError(f"GGUF metadata: {family}.attention.value_length differs from key_length={head_dim}")
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"GGUF metadata: {family}.rope.scaling.type={kind!r} is not supported (none, linear are)")
    scaling = RopeScaling("linear", factor=float(get("rope.scaling.factor"))) if kind == "linear" else None
    window = int(get("attention.sliding_window", 0))
    vocab = tensors.get("token_embd.weight", (0,))[0]
    return ModelConfig(
        architecture=family,
        vocab_size=vocab,
        embed_dim=embed_dim,
        ffn_dim=int(get("feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        max_position=int(get("context_length")),
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        ffn_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_windows=(window,) * num_layers if window else (),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_as_tuple(metadata.get("tokenizer.ggml.eos_token_id")),
    )


_HF_NAMES = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "layer": "model.layers.{}.",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_GGUF_NAMES = {
    "embed": "token_embd", "norm": "output_norm", "head": "output", "layer": "blk.{}.",
    "attention_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "out": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


def pieces(config: ModelConfig, file_format: str) -> list[Piece]:
    """Every tensor that a checkpoint of this configuration must hold, and where it goes among the parameters."""
    names = _HF_NAMES if file_format == "safetensors" else _GGUF_NAMES
    # GGUF keeps the llama family's q and k with the rotary pairs side by side; qwen's as transformers has them.
    interleaved = file_format == "gguf" and config.architecture == "llama"
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    kv, group, dim = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
    within = {"q": slice(0, group * dim), "k": slice(group * dim, (group + 1) * dim)}
    within["v"] = slice((group + 1) * dim, (group + 2) * dim)
    d, f = config.embed_dim, config.ffn_dim
    out = [
        Piece(f"{names['embed']}.weight", ("embed",), (config.vocab_size, d)),
        Piece(f"{names['norm']}.weight", ("norm", "weight"), (d,)),
    ]
    if not config.tie_embeddings:
        out.append(Piece(f"{names['head']}.weight", ("head",), (config.vocab_size, d)))

    for layer in range(config.num_layers):
        prefix = names["layer"].format(layer)

        def add(name: str, leaf: tuple[str, ...], shape: tuple[int, ...], bias: bool = False, layer: int = layer,
                prefix: str = prefix, **where: Any) -> None:  # fmt: skip
            kinds = [("weight", shape)] + ([("bias", shape[:1])] if bias else [])
            for kind, kind_shape in kinds:
                path = ("layers", *leaf, kind)
                out.append(Piece(f"{prefix}{names[name]}.{kind}", path, kind_shape, layer=layer, **where))

        add("attention_norm", ("attention_norm",), (d,))
        add("ffn_norm", ("ffn_norm",), (d,))
        for name in "qkv":
            permute = dim if interleaved and name != "v" else 0
            shape = (heads[name] * dim, d)
            index = (slice(0, kv), within[name])
            add(name, ("attention", "qkv"), shape, config.qkv_bias, index=index, unpermute_head_dim=permute)
        add("out", ("attention", "out"), (d, config.num_heads * dim), config.out_bias)
        if config.qk_norm:
            add("q_norm", ("attention", "q_norm"), (dim,))
            add("k_norm", ("attention", "k_norm"), (dim,))
        add("gate", ("ffn", "gate_up"), (f, d), config.ffn_bias, index=(0,))
        add("up", ("ffn", "gate_up"), (f, d), config.ffn_bias, index=(1,))
        add("down", ("ffn", "down"), (d, f), config.ffn_bias)
    return out


def rope_divisors(frequencies: np.ndarray) -> RopeScaling:
    """Llama 3.1's scaling as a GGUF file's `rope_freqs.weight` holds it: one divisor a frequency."""
    return RopeScaling("frequencies", divisors=tuple(float(x) for x in frequencies))
