"""Perplexity and zero-shot accuracy of a tiny language model, live at each width; and in lm-eval's hands."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitdial import (
    QuantConfig,
    evaluate_language,
    load,
    perplexity,
    prepare,
    read_questions,
    save,
    set_bits,
    token_rows,
)  # fmt: skip
from bitdial.errors import ConfigError
from bitdial.language.evaluate import accuracies
from bitdial.language.tasks import Question

from .made_up import save_tokenizer, tiny_llama, words, write_tasks

transformers = pytest.importorskip("transformers", minversion="5")
TEXT = "the cat sat on a mat because it was big . the dog ran away . What is red ? it is a mat . " * 4
WIDTHS = (8, 2)
pytestmark = pytest.mark.filterwarnings("ignore:.*stay in float:UserWarning")  # the tied or small rest


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    path = tmp_path_factory.mktemp("live") / "model.safetensors"
    config = QuantConfig(bit_choices=WIDTHS, activations="float", keep_first_last=False, group_size=16, start="max")
    model = tiny_llama()
    save(prepare(model, config, {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}), path)
    return load(path, model)


def test_accuracies_by_hand() -> None:
    texts = (("c", " a"), ("c", " bbb"), ("c", " cc"))
    questions = [Question(texts, (1, 3, 2), 1), Question(texts, (1, 3, 2), 0), Question(texts[:2], (1, 3), 0)]
    judged = [-1.0, -2.0, -4.0, -3.0, -3.0, -9.0, -2.0, -2.0]
    # by itself: 0, 0 (the first of two), 0; by length: 1 (-0.67), 1 (-1), 1
    assert accuracies(questions, judged) == {"acc": 2 / 3, "acc_norm": 1 / 3}
    with pytest.raises(ConfigError, match="no questions"):
        accuracies([], [])


def test_plain_data_at_each_width(live: nn.Module, tmp_path: Path) -> None:
    rows = token_rows(TEXT, words, length=12)
    questions = read_questions(write_tasks(tmp_path), ["piqa", "arc_easy", "boolq"])
    seen = []
    for bits in WIDTHS:
        set_bits(live, bits)
        found = evaluate_language(live, words, rows=rows, questions=questions, batch_tokens=50)
        assert found["perplexity"] == pytest.approx(perplexity(live, rows), rel=1e-6)
        counts = {name: (scores["metric"], scores["questions"]) for name, scores in found["zero_shot"].items()}
        assert counts == {"piqa": ("acc_norm", 2), "arc_easy": ("acc_norm", 3), "boolq": ("acc", 2)}
        parts = [found["zero_shot"]["piqa"]["acc_norm"], found["zero_shot"]["arc_easy"]["acc_norm"],
                 found["zero_shot"]["boolq"]["acc"]]  # fmt: skip
        assert found["zero_shot_average"] == pytest.approx(sum(parts) / 3)
        assert parts == [answered(live, questions[name], name) for name in questions]
        seen.append(found)
    assert seen[0]["perplexity"] != seen[1]["perplexity"]
    assert evaluate_language(live, rows=rows).keys() == {"perplexity"}
    assert evaluate_language(live, words, questions=questions).keys() == {"zero_shot", "zero_shot_average"}


def answered(model: nn.Module, questions: list[Question], name: str) -> float:
    """The share of right answers, with one text at a time."""
    right = 0
    for question in questions:
        values = []
        for (context, continuation), length in zip(question.pairs, question.lengths, strict=True):
            tokens = words(context + continuation)["input_ids"]
            start = len(words(context)["input_ids"])
            with torch.no_grad():
                chances = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
            total = sum(float(chances[place - 1, tokens[place]]) for place in range(start, len(tokens)))
            values.append(total / (1 if name == "boolq" else length))
        right += values.index(max(values)) == question.gold
    return right / len(questions)


def test_what_is_refused(live: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        evaluate_language(live, words)
    rows = token_rows(TEXT, words, length=12)
    with pytest.raises(ConfigError, match="batch_tokens=0"):
        evaluate_language(live, rows=rows, batch_tokens=0)
    with pytest.raises(ConfigError, match="tokenizer is of another model"):
        evaluate_language(live, rows=rows + 100)
    questions = read_questions(write_tasks(tmp_path), ["piqa"])
    with pytest.raises(ConfigError, match="give the model's tokenizer"):
        evaluate_language(live, questions=questions)
    with pytest.raises(ConfigError, match="task='mine' is not known"):
        evaluate_language(live, words, questions={"mine": questions["piqa"]})


# --- lm-eval ------------------------------------------------------------------------------------


def test_a_live_model_is_all_that_lm_eval_asks_for(live: nn.Module) -> None:
    """What `HFLM(pretrained=live)` takes from a model; lm-eval itself is not needed here."""
    assert isinstance(live, transformers.PreTrainedModel)
    assert live.device == torch.device("cpu")
    assert live.config.max_position_embeddings == 64
    tokens = torch.arange(12).reshape(2, 6)
    seen = []
    for bits in WIDTHS:
        set_bits(live, bits)
        live.eval()
        live.tie_weights()
        with torch.no_grad():
            positional, named = live(tokens).logits, live(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(positional, named)
        seen.append(positional)
    assert not torch.equal(*seen)


@pytest.mark.filterwarnings("ignore")  # of lm-eval and what it imports
def test_lm_eval_gives_the_same_likelihoods(live: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from bitdial.language.likelihoods import encode, log_likelihoods

    save_tokenizer(tmp_path)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pairs = [
        pair for question in read_questions(write_tasks(tmp_path), ["arc_easy"])["arc_easy"] for pair in question.pairs
    ]
    for bits in WIDTHS:
        set_bits(live, bits)
        model = HFLM(pretrained=live, tokenizer=tokenizer, batch_size=2)
        requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        theirs = [value for value, _ in model.loglikelihood(requests, disable_tqdm=True)]
        assert log_likelihoods(live, encode(tokenizer, pairs)) == pytest.approx(theirs, rel=1e-5)
