"""bitdial with transformers' Trainer: joint_trainer trains all widths in each of its steps.

python examples/transformers_trainer.py    (needs: pip install 'bitdial[hf]' accelerate)
"""

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from bitdial import QuantConfig, TrainConfig, accuracy, evaluate, joint_trainer, prepare, save, set_bits


def main(epochs: int = 1, folder: str = "trainer-out") -> dict[int, float]:
    """Train a tiny BERT on a made-up problem, save the file, and return the accuracy of each width."""
    torch.manual_seed(0)
    tokens = torch.randint(4, 40, (128, 12))
    labels = (tokens[:, 1] > tokens[:, 2]).long()
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    float_model = BertForSequenceClassification(config)
    bit_choices = (8, 4)
    model = prepare(float_model, QuantConfig(bit_choices=bit_choices), {"input_ids": tokens[:32]})
    arguments = TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=16, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    joint_trainer(model, TrainConfig(lr=1e-3), args=arguments, train_dataset=data).train()
    held_out = [({"input_ids": tokens}, labels)]
    found = evaluate(
        model, held_out, bit_choices, measure=lambda model, batches: accuracy(model, batches, output="logits")
    )
    set_bits(model, 8)
    save(model.eval(), f"{folder}/model.safetensors")
    return found


if __name__ == "__main__":
    for bits, right in main(epochs=8).items():
        print(f"{bits} bits: {right:.3f}")
