"""The models of benchmarks/gallery.py: ours, timm's, torchvision's, transformers', and networks as people write them.

Each is a function without arguments that returns a `Case`: a small model with random weights, a batch, and a loss. What
it draws comes from torch's own generator, which the benchmark seeds before.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import gallery_networks as own
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import OwnLosses, build_model
from bitdial.prepare.model_call import Batch

CLASSES, TOKENS = own.CLASSES, 64
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a batch that it takes, and how to train on it.

    `config` has the settings of QuantConfig that differ from the default. Of a detector, which keeps the boxes of the
    best scores, differences are taken of a `part` on `part_inputs`, and that is exported.
    """

    model: nn.Module
    inputs: Batch
    targets: Any
    loss: Loss = F.cross_entropy
    config: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    part_inputs: Tensor | None = None

    @property
    def compared(self) -> Batch:
        """The inputs of what differences are taken of."""
        return self.inputs if self.part_inputs is None else self.part_inputs


def images(batch: int = 4, channels: int = 3, size: int = 16) -> Tensor:
    """Random images (batch, channels, size, size)."""
    return torch.randn(batch, channels, size, size)


def labels(*shape: int, classes: int = CLASSES) -> Tensor:
    """Random labels."""
    return torch.randint(0, classes, shape or (4,))


def tokens(length: int = 12, most: int = 50) -> Tensor:
    """Random tokens (4, length)."""
    return torch.randint(0, most, (4, length))


def on_classes(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (..., classes)."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


@functools.cache
def package_of(name: str) -> ModuleType:
    """The package `name`, which may import torchvision; beside a CPU torch that needs operators, which tests have."""
    path = Path(__file__).resolve().parent.parent / "tests" / "integration" / "torchvision_ops.py"
    spec = importlib.util.spec_from_file_location("torchvision_ops", path)
    assert spec is not None
    assert spec.loader is not None
    operators = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(operators)
    operators.torchvision_or_none()
    return importlib.import_module(name)


# --- ours -----------------------------------------------------------------------------------------


def ours(name: str, x: Tensor, quantised: Mapping[str, Any] | None = None, **arguments: Any) -> Case:
    """A ready-made model of bitdial's; `quantised` are settings of QuantConfig."""
    model = build_model(name, num_classes=CLASSES, **arguments)
    return Case(model=model, inputs=x, targets=labels(), config=quantised or {})


OURS: dict[str, Callable[[], Case]] = {
    "cifar_resnet": lambda: ours("cifar_resnet", images(), blocks=1, width=8),
    "resnet18": lambda: ours("resnet18", images(size=32), {"start": "3std"}),
    "mobilenet_v2": lambda: ours("mobilenet_v2", images(size=32), {"start": "3std"}),
    "tiny_transformer": lambda: ours("tiny_transformer", tokens(), vocab=TOKENS, width=32, depth=2),
}


# --- people's own ---------------------------------------------------------------------------------


def _heads(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(output["policy"], targets) + output["value"].square().mean()


def _two_heads() -> Case:
    return Case(model=own.TwoHeads(), inputs=images(channels=4), targets=labels(classes=6), loss=_heads)


def _autoencoder() -> Case:
    x = torch.rand(4, 1, 16, 16)
    return Case(model=own.Autoencoder(), inputs=x, targets=x, loss=F.mse_loss)


def _tabular() -> Case:
    categories = torch.stack([torch.randint(0, size, (8,)) for size in (5, 12, 30)], dim=1)
    return Case(model=own.Tabular(), inputs=(categories, torch.randn(8, 6)), targets=labels(8, classes=2))


def _two_images(model: nn.Module) -> Case:
    pair = (images(channels=1), images(channels=1))
    return Case(model=model, inputs=pair, targets=torch.rand(4), loss=F.mse_loss)


def _translator() -> Case:
    target = tokens(8)
    return Case(model=own.Translator(), inputs=(tokens(), target), targets=target, loss=on_classes)


OWN: dict[str, Callable[[], Case]] = {
    "UNet": lambda: Case(model=own.UNet(), inputs=images(), targets=labels(4, 16, 16)),
    "LSTM classifier": lambda: Case(model=own.RecurrentClassifier(nn.LSTM), inputs=tokens(), targets=labels()),
    "GRU classifier": lambda: Case(model=own.RecurrentClassifier(nn.GRU), inputs=tokens(), targets=labels()),
    "MLP-Mixer": lambda: Case(model=own.MLPMixer(), inputs=images(), targets=labels()),
    "ConvNeXt": lambda: Case(model=own.ConvNeXt(), inputs=images(size=32), targets=labels()),
    "audio, 1-D": lambda: Case(model=own.Audio(), inputs=torch.randn(4, 1, 256), targets=labels()),
    "video, 3-D": lambda: Case(model=own.Video(), inputs=torch.randn(4, 3, 4, 8, 8), targets=labels()),
    "tabular MLP": _tabular,
    "siamese network": lambda: _two_images(own.Siamese()),
    "control flow": lambda: Case(model=own.ControlFlow(), inputs=torch.randn(4, 16), targets=labels()),
    "nn.TransformerEncoder": lambda: Case(model=own.Encoder(), inputs=tokens(), targets=labels()),
    "nn.Transformer": _translator,
    "autoencoder": _autoencoder,
    "weight norm": lambda: Case(model=own.WeightNorm(), inputs=torch.randn(4, 1, 32), targets=labels()),
    "depthwise-separable": lambda: Case(model=own.Separable(), inputs=images(), targets=labels()),
    "GAN generator": lambda: Case(
        model=own.Generator(), inputs=torch.randn(4, 16), targets=images().tanh(), loss=F.mse_loss
    ),
    "squeeze-excite": lambda: Case(model=own.SqueezeExcite(), inputs=images(), targets=labels()),
    "PointNet": lambda: Case(model=own.PointNet(), inputs=torch.randn(4, 3, 20), targets=labels()),
    "two heads, a dict": _two_heads,
    "mixture of experts": lambda: Case(model=own.Experts(), inputs=torch.randn(16, 16), targets=labels(16)),
    "graph network": lambda: Case(
        model=own.GraphNet(), inputs=(torch.randn(4, 6, 8), torch.rand(4, 6, 6).softmax(-1)), targets=labels()
    ),
}


# --- transformers ---------------------------------------------------------------------------------

SMALL = {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FORWARD = {"intermediate_size": 64, "max_position_embeddings": 32}
WEIGHTS_ONLY = {"activations": "float", "group_size": 32, "keep_first_last": False, "start": "max"}
DECODER = {**SMALL, **FORWARD, "num_key_value_heads": 2, "use_cache": False, "tie_word_embeddings": False}


def _logits(output: Any, targets: Tensor) -> Tensor:
    return on_classes(output.logits, targets)


def _last_state(output: Any, targets: Tensor) -> Tensor:
    return F.mse_loss(output.last_hidden_state, targets)


def transformer(
    name: str, head: str, settings: Mapping[str, Any], inputs: dict[str, Tensor], targets: Tensor, **quantised: Any
) -> Case:
    """A model of transformers' from its config; `quantised` are settings of QuantConfig."""
    package = package_of("transformers")
    model = getattr(package, f"{name}{head}")(getattr(package, f"{name}Config")(**settings))
    return Case(model=model, inputs=inputs, targets=targets, loss=_logits, config=quantised)


def decoder(name: str, quantised: Mapping[str, Any] | None = None, **settings: Any) -> Case:
    """A language model: its targets are its inputs."""
    text = tokens()
    return transformer(name, "ForCausalLM", {**DECODER, **settings}, {"input_ids": text}, text, **(quantised or {}))


def _gpt2() -> Case:
    settings = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False,
                "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    return transformer("GPT2", "LMHeadModel", settings, {"input_ids": (text := tokens())}, text)


def _t5() -> Case:
    settings = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    inputs = {"input_ids": tokens(), "decoder_input_ids": (text := tokens(8))}
    return transformer("T5", "ForConditionalGeneration", {**settings, "use_cache": False}, inputs, text)


def _whisper() -> Case:
    package = package_of("transformers")
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = package.WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, num_mel_bins=16,
        max_source_positions=20, encoder_layerdrop=0.0,
    )  # fmt: skip
    states = torch.randn(4, 20, 32)
    inputs = {"input_features": torch.randn(4, 16, 40)}
    return Case(model=WhisperEncoder(config), inputs=inputs, targets=states, loss=_last_state)


def _vit() -> Case:
    settings = {k: v for k, v in (SMALL | FORWARD).items() if k not in ("vocab_size", "max_position_embeddings")}
    return transformer(
        "ViT", "ForImageClassification", {**settings, "image_size": 16, "patch_size": 4, "num_labels": CLASSES},
        {"pixel_values": images()}, labels(),
    )  # fmt: skip


def _bert(name: str = "Bert", **settings: Any) -> Case:
    mask = torch.ones(4, 12, dtype=torch.long)
    inputs = {"input_ids": 4 + tokens(most=TOKENS - 4), "attention_mask": mask}
    return transformer(
        name, "ForSequenceClassification", {**SMALL, **FORWARD, "num_labels": CLASSES, **settings}, inputs, labels()
    )


TRANSFORMERS: dict[str, Callable[[], Case]] = {
    "BERT": _bert,
    "RoBERTa": lambda: _bert("Roberta"),
    "DistilBERT": lambda: _bert("DistilBert", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "GPT-2": _gpt2,
    "Llama": lambda: decoder("Llama"),
    "Llama, tied": lambda: decoder("Llama", tie_word_embeddings=True),
    "Llama, weights only": lambda: decoder("Llama", WEIGHTS_ONLY),
    "Qwen2": lambda: decoder("Qwen2"),
    "Gemma": lambda: decoder("Gemma", head_dim=8),
    "Mixtral": lambda: decoder("Mixtral", num_local_experts=4),
    "T5": _t5,
    "ViT": _vit,
    "Whisper encoder": _whisper,
}


# --- timm -----------------------------------------------------------------------------------------


def timm(name: str, size: int = 32, **arguments: Any) -> Case:
    """A model of timm's by its name there, for images of `size`."""
    model = package_of("timm").create_model(name, num_classes=CLASSES, **arguments)
    return Case(model=model, inputs=images(size=size), targets=labels(), config={"start": "3std"})


def _mixer() -> Case:
    package_of("timm")
    mixer = importlib.import_module("timm.models.mlp_mixer").MlpMixer
    model = mixer(num_classes=CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=64)
    return Case(model=model, inputs=images(size=32), targets=labels())


PATCHES = {"img_size": 32, "patch_size": 8}
TIMM: dict[str, Callable[[], Case]] = {
    "resnet18": lambda: timm("resnet18", channels=(16, 32, 64, 128)),
    "resnet26": lambda: timm("resnet26", channels=(16, 32, 64, 128)),
    "regnetx_002": lambda: timm("regnetx_002"),
    "regnety_002": lambda: timm("regnety_002"),
    "efficientnet_lite0": lambda: timm("efficientnet_lite0"),
    "efficientnet_b0": lambda: timm("efficientnet_b0"),
    "mobilenetv3_small_050": lambda: timm("mobilenetv3_small_050"),
    "mobilenetv4_conv_small": lambda: timm("mobilenetv4_conv_small"),
    "densenet121": lambda: timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "repvgg_a0": lambda: timm("repvgg_a0"),
    "ghostnet_050": lambda: timm("ghostnet_050"),
    "nf_regnet_b0": lambda: timm("nf_regnet_b0"),
    "convnext_atto": lambda: timm("convnext_atto", depths=(1, 1, 2, 1)),
    "convnext_femto": lambda: timm("convnext_femto", depths=(1, 1, 2, 1)),
    "vit_tiny": lambda: timm("vit_tiny_patch16_224", **PATCHES, depth=2),
    "deit_tiny, distilled": lambda: timm("deit_tiny_distilled_patch16_224", **PATCHES, depth=2),
    "MlpMixer": _mixer,
    "swin_tiny": lambda: timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
    ),
    "levit_128s": lambda: timm("levit_128s", size=64, img_size=64),
    "mobilevit_xxs": lambda: timm("mobilevit_xxs", size=64),
    "edgenext_xx_small": lambda: timm("edgenext_xx_small", size=64),
    "pit_ti": lambda: timm("pit_ti_224", size=224),
}


# --- torchvision: detectors and segmentation ------------------------------------------------------

NONE = {"weights": None, "weights_backbone": None, "num_classes": 3}
SMALL_IMAGES = {"min_size": 64, "max_size": 96}
TWO_STAGES = {**SMALL_IMAGES, "box_score_thresh": 0.0, "box_detections_per_img": 4, "rpn_pre_nms_top_n_test": 20,
              "rpn_post_nms_top_n_test": 8}  # fmt: skip
ONE_STAGE = {"score_thresh": 0.0, "detections_per_img": 4, "topk_candidates": 8}


def detector(name: str, settings: Mapping[str, Any]) -> Case:
    """A detector of torchvision's on two images, of odd sizes, with one object each; it keeps boxes of any score."""
    model = getattr(package_of("torchvision").models.detection, name)(**NONE, **settings)
    pictures = [torch.rand(3, 40, 48), torch.rand(3, 37, 61)]
    corners = torch.tensor([[4.0, 5.0, 20.0, 24.0]])
    targets = []
    for number, picture in enumerate(pictures):
        mask = torch.zeros(1, *picture.shape[1:], dtype=torch.uint8)
        mask[:, 5:24, 4:20] = 1
        targets.append({"boxes": corners, "labels": torch.tensor([1 + number]), "masks": mask})
    return Case(
        model=model, inputs=pictures, targets=targets, loss=OwnLosses(), config={"start": "3std"},
        part="backbone", part_inputs=images(2, size=320 if "ssd" in name else 64),
    )  # fmt: skip


def _pixels(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], targets)


def segmentation(name: str) -> Case:
    """A segmentation model of torchvision's."""
    model = getattr(package_of("torchvision").models.segmentation, name)(**NONE)
    return Case(
        model=model, inputs=images(2, size=48), targets=labels(2, 48, 48, classes=3), loss=_pixels,
        config={"start": "3std"},
    )  # fmt: skip


TORCHVISION: dict[str, Callable[[], Case]] = {
    "maskrcnn_resnet50_fpn": lambda: detector("maskrcnn_resnet50_fpn", TWO_STAGES),
    "maskrcnn_resnet50_fpn_v2": lambda: detector("maskrcnn_resnet50_fpn_v2", TWO_STAGES),
    "fasterrcnn_resnet50_fpn_v2": lambda: detector("fasterrcnn_resnet50_fpn_v2", TWO_STAGES),
    "fasterrcnn_mobilenet_v3_large_fpn": lambda: detector("fasterrcnn_mobilenet_v3_large_fpn", TWO_STAGES),
    "retinanet_resnet50_fpn": lambda: detector("retinanet_resnet50_fpn", SMALL_IMAGES | ONE_STAGE),
    "retinanet_resnet50_fpn_v2": lambda: detector("retinanet_resnet50_fpn_v2", SMALL_IMAGES | ONE_STAGE),
    "fcos_resnet50_fpn": lambda: detector("fcos_resnet50_fpn", SMALL_IMAGES | ONE_STAGE),
    "ssdlite320_mobilenet_v3_large": lambda: detector("ssdlite320_mobilenet_v3_large", ONE_STAGE),
    "ssd300_vgg16": lambda: detector("ssd300_vgg16", ONE_STAGE),
    "deeplabv3_resnet50": lambda: segmentation("deeplabv3_resnet50"),
    "fcn_resnet50": lambda: segmentation("fcn_resnet50"),
    "lraspp_mobilenet_v3_large": lambda: segmentation("lraspp_mobilenet_v3_large"),
}
