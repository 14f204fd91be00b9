"""Greedy text of llama.cpp on our GGUF files against that of the live model at the same width.

    python benchmarks/gguf_parity.py --model DIR             # rows in results/gguf-parity.json

DIR is a transformers folder in float32 with its tokenizer. The model goes through `prepare` and `save`, nothing
trained; each width is exported, and 20 prompts are continued by 20 tokens: by the live model on float kernels, by
llama.cpp on the file (PyPI llama-cpp-python), and by llama.cpp on a file with the very same weights in float32.

llama.cpp rounds what goes into a product with packed weights to 8 bits. It does not do so with float32 weights: if
those give our text, that is what other texts come from. `gap` is how much less our model's logit was for the token
that llama.cpp took instead, where texts part; `spread` is the standard deviation of our logits there.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from timing import command
from torch import nn

import bitdial
from bitdial import QuantConfig, export_gguf, load, prepare, save, set_bits
from bitdial.language.folder import load_float, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    "The capital of France is", "Water boils at a temperature of", "Once upon a time, in a small village,",
    "The three primary colours are", "To bake a loaf of bread you need", "The largest planet of the solar system is",
    "A prime number is a number that", "The first president of the United States was", "In the year 1969, people",
    "Dear Sir or Madam,", "The opposite of hot is", "def factorial(n):\n", "Photosynthesis is the process by which",
    "My favourite season is autumn because", "The quick brown fox", "Two plus two is", "She opened the door and",
    "The main reason for the seasons is", "A good way to learn a language is", "Shakespeare wrote",
)  # fmt: skip
TOKENS = 20
Next = Callable[[list[int]], np.ndarray]


def of_live(live: nn.Module) -> Next:
    """The logits of the live model behind some tokens; it keeps the keys and values of what it has seen."""
    seen: dict[str, Any] = {"ids": [], "cache": None}

    def logits(ids: list[int]) -> np.ndarray:
        if ids[: len(seen["ids"])] != seen["ids"] or not seen["ids"]:
            seen.update(ids=[], cache=None)
        new = torch.tensor([ids[len(seen["ids"]) :]])
        with torch.inference_mode():
            out = live(input_ids=new, past_key_values=seen["cache"], use_cache=True)
        seen.update(ids=list(ids), cache=out.past_key_values)
        return out.logits[0, -1].float().numpy()

    return logits


def of_llama_cpp(path: Path) -> tuple[Any, Next]:
    """llama.cpp on a file, with keys and values in float32, and its logits behind some tokens."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=256, n_threads=torch.get_num_threads(), verbose=False,
        type_k=gguf.GGMLQuantizationType.F32, type_v=gguf.GGMLQuantizationType.F32,
    )  # fmt: skip
    seen: list[int] = []

    def logits(ids: list[int]) -> np.ndarray:
        if ids[: len(seen)] != seen or not seen:
            model.reset()
            seen.clear()
        model.eval(ids[len(seen) :])
        seen[:] = ids
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),)).copy()

    return model, logits


def greedy(logits: Next, prompt: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    """TOKENS tokens behind `prompt`, each the likeliest, with the logits that it was taken from."""
    ids = list(prompt)
    for _ in range(TOKENS):
        found = logits(ids)
        ids.append(int(found.argmax()))
        yield ids[-1], found


def in_float32(path: Path, out: Path) -> None:
    """The same file with every tensor as the library decodes it, in float32."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, decoded.reshape(tensor.shape.tolist()[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(ours: list[list[tuple[int, np.ndarray]]], theirs: list[list[int]]) -> dict[str, Any]:
    """How many texts are equal, and where the others part."""
    parted = []
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        place = next((i for i, ((a, _), b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if place is not None:
            token, logits = mine[place]
            gap, spread = float(logits[token] - logits[other[place]]), float(logits.std())
            parted.append({"prompt": PROMPTS[number], "after": place, "gap": round(gap, 4), "spread": round(spread, 3)})
    return {"prompts": len(ours), "tokens": TOKENS, "equal": len(ours) - len(parted), "parted": parted}


def main() -> None:
    """Export, run, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--group-scales", default="half")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gguf-parity.json")
    options = parser.parse_args()
    import llama_cpp

    model, tokenizer = load_float(options.model), load_tokenizer(options.model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    config = QuantConfig(
        bit_choices=(8, 6, 4, 3, 2), activations="float", keep_first_last=False, group_size=32,
        group_scales=options.group_scales, start="max",
    )  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(prepare(model, config, {"input_ids": torch.tensor(prompts[0])[None]}), path)
        live = load(path, model, kernels="float")
        for bits in options.bits:
            set_bits(live, bits)
            ours = [list(greedy(of_live(live), prompt)) for prompt in prompts]
            done = export_gguf(path, Path(folder) / "packed.gguf", options.model, bits=bits)
            in_float32(done.path, Path(folder) / "float32.gguf")
            found: dict[str, Any] = {}
            for name in ("packed", "float32"):
                theirs, logits = of_llama_cpp(Path(folder) / f"{name}.gguf")
                pairs = zip(PROMPTS, prompts, strict=True)
                same = [theirs.tokenize(text.encode(), add_bos=True) == ids for text, ids in pairs]
                found[name] = compare(ours, [[token for token, _ in greedy(logits, prompt)] for prompt in prompts])
                found["prompts_cut_alike"] = sum(same)
                theirs.close()
            worst = max(done.rounded.values(), key=lambda each: each.rms, default=None)
            rows.append({
                "bits": bits, "types": {name: len(names) for name, names in done.types.items()},
                "file_bytes": done.bytes, "rounded": worst and worst._asdict(), **found,
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    record = {
        "command": command("gguf_parity").replace(str(options.model), "DIR"), "model": options.model.name,
        "config": config.to_dict(), "rows": rows, "device": platform.processor() or "cpu",
        "llama_cpp": llama_cpp.llama_print_system_info().decode().strip(),
        "versions": {
            "bitdial": bitdial.__version__, "python": platform.python_version(), "torch": torch.__version__,
            "gguf": version("gguf"), "llama_cpp_python": llama_cpp.__version__,
        },
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
