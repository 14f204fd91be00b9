"""A BERT classifier from transformers: prepare, train all widths, save, load, switch.

    python examples/transformers_bert.py                        # a tiny BERT with random weights, random sentences
    python examples/transformers_bert.py --weights FILE         # the tiny BERT's weights from a safetensors file

Needs the extra `hf`, no network. For a model of your own, replace `build` by your `from_pretrained(...)`.
"""

import argparse
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from transformers import BertConfig, BertForSequenceClassification

from bitdial import JointStep, QuantConfig, TrainConfig, load, prepare, save, set_bits

CLASSES, WORDS, LENGTH = 2, 100, 16


def build(weights: Path | None) -> BertForSequenceClassification:
    """A BERT of two layers."""
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LENGTH, num_labels=CLASSES,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    if weights is not None:
        model.load_state_dict(safetensors.torch.load_file(weights))
    return model


def sentences(count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random words, and as a label whether the first is of the upper half."""
    words = torch.randint(1, WORDS, (count, LENGTH))
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}, (words[:, 0] > WORDS // 2).long()


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build(options.weights)

    # A batch is a dict of the model's keyword arguments. Activations around zero are signed, which "auto" finds.
    calibration, _ = sentences(32)
    prepared = prepare(model, QuantConfig(bit_choices=(8, 4, 2)), calibration)

    # The model returns a ModelOutput, so the loss says where the logits are.
    def loss(output: object, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.logits, labels)

    step = JointStep(prepared, TrainConfig(epochs=1, lr=1e-3), steps_per_epoch=options.steps, loss=loss)
    for _ in range(options.steps):
        report = step(*sentences(32))
    step.end_epoch()
    print("last losses:", {bits: round(float(value), 3) for bits, value in report.loss.items()})

    # One file for all widths. `load` takes a model of the same architecture; its weights do not matter.
    inputs, labels = sentences(256)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bert.safetensors"
        save(prepared.eval(), path)
        live = load(path, build(None))
        print(f"{path.stat().st_size:,} bytes for all widths")
    for bits in (8, 4, 2):
        set_bits(prepared, bits)
        set_bits(live, bits)
        with torch.no_grad():
            logits = live(**inputs).logits
            same = torch.equal(logits, prepared(**inputs).logits)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        print(f"{bits} bits: accuracy {accuracy:.3f}, the trained model's logits: {same}")


if __name__ == "__main__":
    main()
