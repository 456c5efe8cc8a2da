"""Text to token ids and back, chat templates, incremental detokenization and stop strings (host only)."""

from jaxinfer.tokenizer.blank import blank_tokenizer
from jaxinfer.tokenizer.chat_template import ChatTemplateError, render_chat_template
from jaxinfer.tokenizer.detokenizer import IncrementalDetokenizer
from jaxinfer.tokenizer.gguf_vocab import tokenizer_from_gguf
from jaxinfer.tokenizer.hf_folder import load_tokenizer
from jaxinfer.tokenizer.stop_strings import StopStrings
from jaxinfer.tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChatTemplateError",
    "IncrementalDetokenizer",
    "StopStrings",
    "Tokenizer",
    "blank_tokenizer",
    "load_tokenizer",
    "render_chat_template",
    "tokenizer_from_gguf",
]
