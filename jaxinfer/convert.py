"""`python -m jaxinfer.convert SRC checkpoints/NAME`: keep a model in jaxinfer's own format, ready to be served.

The parameters are stored as they lie in memory, so that `LLM(model="checkpoints/NAME")` reads and does not convert.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.config import DTYPES


def main(argv: list[str] | None = None) -> int:
    """Convert one model. Returns the exit code: 0, or 1 after one line on stderr that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m jaxinfer.convert", description=__doc__)
    parser.add_argument("source", metavar="SRC", help="a GGUF file, a Hugging Face folder or a hub id")
    parser.add_argument("destination", metavar="DEST", type=Path, help="the folder to make, such as checkpoints/NAME")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of the stored parameters; auto is what LLM would use on this machine",
    )
    parser.add_argument("--revision", help="a branch, tag or commit; hub ids only")
    parser.add_argument("--tokenizer", metavar="PATH", help="a file, folder or hub id to take the tokenizer from")
    parser.add_argument("--overwrite", action="store_true", help="replace a converted checkpoint that is there")
    arguments = parser.parse_args(argv)
    try:
        convert(**vars(arguments))
    except (ValueError, OSError) as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 1
    return 0


def convert(
    source: str,
    destination: Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
) -> None:
    """Load `source` as `LLM` would, and save it with its tokenizer, printing what is done, bytes and seconds.

    The folder appears under its name only once it is complete.

    Raises:
        CheckpointError: (a ValueError) the source cannot be read, or the destination is there and not to be replaced.
        ValueError: the source has no usable tokenizer.
    """
    from jaxinfer.checkpoint.config_json import model_config_to_json
    from jaxinfer.checkpoint.hub import resolve_model
    from jaxinfer.checkpoint.orbax import check_destination, save_checkpoint
    from jaxinfer.engine.load import auto_dtype, load_model, named_leaves
    from jaxinfer.tokenizer import load_tokenizer

    check_destination(destination, overwrite)
    resolved = resolve_model(source, revision=revision, tokenizer=tokenizer)
    print(resolved.source)
    # A source that lacks a tokenizer is refused before the work, not when the result is served.
    print(f"tokenizer: {load_tokenizer(resolved.tokenizer)}")
    dtype = auto_dtype() if dtype == "auto" else dtype
    start_s = time.monotonic()
    model = load_model(resolved.path, dtype)
    params = named_leaves(model.params)
    num_bytes = sum(array.nbytes for array in params.values())
    print(f"loaded: {num_bytes:,} bytes of {dtype} parameters in {time.monotonic() - start_s:.1f} s")
    start_s = time.monotonic()
    save_checkpoint(
        destination,
        params,
        model_config_to_json(model.config),
        _companions(resolved.tokenizer, model.generation_config),
        source=f"{Path(source).name if Path(source).exists() else source}{f' at {revision}' if revision else ''}",
        overwrite=overwrite,
    )
    written_bytes = sum(path.stat().st_size for path in destination.rglob("*") if path.is_file())
    print(f"saved: {written_bytes:,} bytes in {destination} in {time.monotonic() - start_s:.1f} s")


def _companions(tokenizer: Path, generation_config: Mapping[str, Any]) -> dict[str, Path | bytes]:
    """The tokenizer's files, and the model's own generation_config.json with the end tokens that the tokenizer has."""
    from jaxinfer.checkpoint.reader import read_json
    from jaxinfer.tokenizer.files import tokenizer_files

    name = "generation_config.json"
    files = tokenizer_files(tokenizer)
    theirs = files.pop(name, None)
    merged = {key: value for key, value in generation_config.items() if key != "eos_token_id"}
    ends = read_json(theirs).get("eos_token_id") if isinstance(theirs, Path) else None
    if ends is not None:
        merged["eos_token_id"] = ends
    return {**files, name: json.dumps(merged, indent=2).encode()} if merged else files


if __name__ == "__main__":
    raise SystemExit(main())
