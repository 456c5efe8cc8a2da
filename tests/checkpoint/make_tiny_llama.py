"""Makes checkpoints/tiny-llama: a random Llama with a byte-level tokenizer, small enough to commit.

    python -m tests.checkpoint.make_tiny_llama

Its source, a Hugging Face folder, can be made again at any time, bit for bit: `RandomState`'s stream is frozen. Weights
are larger than an initializer's, so that a mistake anywhere moves the logits. `write_gguf` makes a GGUF file of the
same shape, quantized, for tests of that road.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FIXTURE = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-llama"

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [
    "h e", "Ġ t", "Ġt he", "i n", "a n", "e r", "o n", "r e", "Ġ a", "e n", "Ġ s", "i s", "o r", "Ġ w", "a t",
    "o u", "Ġ c", "l l", "e s", "Ġ o", "i t", "in g", "Ġ f", "Ġ p", "e d", "Ġa n", "an d", "Ġo f", "ou n",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def _layer_shapes() -> dict[str, tuple[int, ...]]:
    d, f, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["hidden_size"] // 2
    return {
        "input_layernorm": (d,), "post_attention_layernorm": (d,),
        "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    }  # fmt: skip


def weights() -> dict[str, np.ndarray]:
    """The model's tensors, float32, by their Hugging Face names."""
    random = np.random.RandomState(0)

    def make(shape: tuple[int, ...]) -> np.ndarray:
        noise = random.standard_normal(shape)
        return (1 + 0.2 * noise if len(shape) == 1 else 1.5 * noise / shape[1] ** 0.5).astype(np.float32)

    found = {"model.embed_tokens.weight": make((len(VOCAB), CONFIG["hidden_size"]))}
    for layer in range(CONFIG["num_hidden_layers"]):
        found |= {f"model.layers.{layer}.{name}.weight": make(shape) for name, shape in _layer_shapes().items()}
    return {**found, "model.norm.weight": make((CONFIG["hidden_size"],))}


def write_hf(folder: Path) -> Path:
    """The source of the fixture: a Hugging Face folder with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(weights(), folder / "model.safetensors")
    ids = {token: token_id for token_id, token in enumerate(VOCAB)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(ids, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config": CONFIG,
        "generation_config": {"bos_token_id": 1, "eos_token_id": [2, 0]},
        "tokenizer_config": {
            "bos_token": SPECIALS[1],
            "eos_token": SPECIALS[2],
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    """A GGUF file with the same vocabulary, its matrices in Q8_0. Rows of q and k are left as they come."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(VOCAB) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in weights().items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            gguf_name = f"blk.{layer}.{_GGUF_NAMES[stem]}.weight"
        else:
            gguf_name = f"{_GGUF_NAMES[stem]}.weight"
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(gguf_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> int:
    from jaxinfer.convert import main as convert

    with tempfile.TemporaryDirectory() as folder:
        source = write_hf(Path(folder, "tiny-llama-source"))
        return convert([str(source), str(FIXTURE), "--dtype", "float32", "--overwrite"])


if __name__ == "__main__":
    raise SystemExit(main())
