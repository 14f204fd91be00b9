"""transformers' own verbs on folders of bitdial: `from_pretrained` gives a live model.

transformers builds the model without memory, asks the quantizer before and after it fills in weights, and knows by
name only weights of float layers. So the model is emptied before that, filled with the live layers behind it, and
transformers finds nothing to fill in. What is read and checked is what `load_pretrained` reads and checks.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial.artifact import Artifact, fit
from bitdial.errors import ArtifactError, BitdialError, ConfigError
from bitdial.export.transformers_folder import (
    ARTIFACT,
    BITS_ENTRY,
    CONFIG,
    METHOD,
    WEIGHTS_ENTRY,
    checked_artifact,
    import_transformers,
    json_object,
    own_type,
    set_as_stored,
)
from bitdial.export.transformers_live import as_pretrained
from bitdial.live.kernel_choice import choose_kernels
from bitdial.live.load import load_into, usable_device
from bitdial.live.skeleton import NoInitialValues

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")
DEEPEST = 10_000  # transformers makes a module for each layer before the file can tell
CONTENT = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")  # of a module, besides its hooks
IGNORED = "_keys_to_ignore_on_load_unexpected"  # an attribute, a set or a list by version: tensors nobody misses
SPREAD = ("balanced", "balanced_low_0")  # device maps by which transformers uses all GPUs


def register() -> None:
    """Make bitdial's folders known to transformers; a second call changes nothing."""
    from transformers.quantizers import auto

    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        config, quantizer = _classes()
        auto.register_quantization_config(METHOD)(config)
        auto.register_quantizer(METHOD)(quantizer)


def quantizer_for(described: Mapping[str, Any]) -> Any:
    """The quantizer of a live model whose folder's config has the entry `described`."""
    import_transformers()
    from transformers.quantizers import auto

    register()
    return auto.AutoHfQuantizer.from_config(dict(described), pre_quantized=True)


def _classes() -> tuple[type, type]:
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class BitdialConfig(QuantizationConfigMixin):  # type: ignore[misc]  # it has no types
        """What a folder's config says of its artifact, as it is there."""

        def __init__(self, /, **described: Any):
            self.described, self.quant_method = described, METHOD

        def to_dict(self) -> dict[str, Any]:
            return {**self.described}

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            yield from self.to_dict().items()

    class BitdialQuantizer(HfQuantizer):  # type: ignore[misc]  # it has no types
        """Hands every step to `Loading`."""

        requires_calibration = True  # it does not quantise float models
        is_trainable = False
        is_compileable = True

        def __init__(self, quantization_config: Any, **kwargs: Any):
            super().__init__(quantization_config, **kwargs)
            self.loading: Any = Loading(quantization_config.to_dict())  # None behind it

        def update_device_map(self, device_map: Any) -> None:
            self.loading.device = one_device(device_map)

        def update_attn_implementation(self, config: Any) -> Any:
            return self.loading.see_config(config)

        update_tp_plan = update_attn_implementation  # what transformers before 5.18 calls at this place

        def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
            self.loading.dtype = dtype
            return dtype

        def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> Any:
            if not checkpoint_files:
                raise ConfigError("a live model is made of a folder's file; give the folder, and no state_dict")
            self.loading.empty(model, Path(checkpoint_files[0]))
            return model

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            self.loading.fill(model, self)
            self.loading = None
            return model

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return True

        def get_state_dict_and_metadata(self, model: Any, *_: Any, **__: Any) -> Any:
            raise ConfigError("the state of a live model is not its file; call its own save_pretrained(folder)")

    return BitdialConfig, BitdialQuantizer


def one_device(device_map: Any) -> torch.device:
    """The device that a `device_map` of transformers names; ConfigError if there are several."""
    if device_map is None:
        return torch.device("cpu")
    if isinstance(device_map, str):
        several = torch.cuda.device_count() > 1
        if device_map in SPREAD and several:
            raise ConfigError(
                f"device_map={device_map!r} spreads a model; a live one is on one device: 'auto', 'cuda:1'"
            )
        if device_map in ("auto", *SPREAD):
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return usable_device(device_map)
    names = [torch.device("cuda", place) if isinstance(place, int) else place for place in device_map.values()]
    devices = sorted({str(name) for name in names})
    if len(devices) != 1 or devices == ["disk"]:
        raise ConfigError(
            f"device_map places the model on {' and '.join(devices)}; a live one is on one device: 'auto' or 'cuda:0'"
        )
    return usable_device(devices[0])


class Loading:
    """One `from_pretrained`, from the config to the live model."""

    def __init__(self, described: dict[str, Any]):
        self.described = described
        self.device = torch.device("cpu")
        self.dtype: torch.dtype | None = None
        self.bits: Any = None
        self.file = Path()
        self.artifact: Artifact | None = None
        self.before: dict[str, Any] = {}

    def see_config(self, config: Any) -> Any:
        """Take from `config` what is about reading the folder, and name in it the file to read; returns it."""
        if getattr(config, "distributed_config", None) is not None:
            raise ConfigError("a live model is on one device; leave out distributed_config, tp_plan and tp_size")
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            for key in DEPTHS:
                if isinstance(depth := getattr(part, key, None), int) and depth > DEEPEST:
                    raise ArtifactError(f"{key} is {depth} in the config; no model has more than {DEEPEST} layers")
        self.bits = getattr(config, BITS_ENTRY, None)
        name = config.name_or_path  # empty where the user gave a class of models, not an auto class
        if hasattr(config, WEIGHTS_ENTRY) or (name and (Path(name) / ARTIFACT).is_file()):
            setattr(config, WEIGHTS_ENTRY, ARTIFACT)
        if config.dtype is None:  # else transformers takes that of the first tensor
            config.dtype = torch.float32
        return config

    def empty(self, model: Any, file: Path) -> None:
        """Read the file, and take everything out of `model`, which has no memory yet."""
        with torch.device("cpu"):  # transformers calls this where its own tensors have no memory
            self.file, self.artifact = file, checked_artifact(file, self.described)
        nothing: dict[str, Any] = {
            "_modules": {}, "_parameters": {}, "_buffers": {}, "_non_persistent_buffers_set": set(),
            "all_tied_weights_keys": {}, IGNORED: {".*"} if isinstance(vars(model).get(IGNORED), set) else [".*"],
        }  # fmt: skip
        self.before = {name: vars(model)[name] for name in nothing if name in vars(model)}
        vars(model).update(nothing)

    @torch.inference_mode(False)  # what is made within inference mode could not be switched outside
    def fill(self, model: Any, quantizer: Any) -> None:
        """Put the live layers into `model`, in place."""
        artifact = self.artifact
        assert artifact is not None
        dtype = self._type(artifact)
        # The integer engine wraps a model, and transformers returns the one that it has made.
        kernels = choose_kernels(artifact, self.device, dtype, None)
        with torch.random.fork_rng(), NoInitialValues():
            float_model = self._fitting(type(model), model.config, artifact)
        for name in ("all_tied_weights_keys", IGNORED):
            del vars(model)[name]
        vars(model).update(self.before)
        vars(model).update({name: vars(float_model)[name] for name in CONTENT})
        model.is_quantized = False  # transformers has said so before; such a model refuses to be made float32
        live = load_into(
            model, artifact, device=self.device, dtype=dtype, kernels="float" if kernels == "integer" else kernels
        )
        assert live is model
        set_as_stored(live, self.bits)
        as_pretrained(live, quantizer, self.file, artifact.digest, dtype)

    def _fitting(self, architecture: Any, config: Any, artifact: Artifact) -> nn.Module:
        """The float model, with any weights; tried without memory against the file first."""
        try:
            with torch.device("meta"):
                fit(artifact, architecture._from_config(config, dtype=torch.float32))
        except BitdialError as problem:
            raise ArtifactError(f"{self.file.parent / CONFIG} does not fit {self.file.name}: {problem}") from problem
        model: nn.Module = architecture._from_config(config, dtype=torch.float32)
        return model

    def _type(self, artifact: Artifact) -> torch.dtype | None:
        """The 16 bits to run in, None for float32. What the folder names is no request if the model cannot have it."""
        path = self.file.parent / CONFIG
        settings = json_object(path) if path.is_file() else {}
        named = settings.get("dtype", settings.get("torch_dtype"))
        if self.dtype in (None, torch.float32):
            return None
        return own_type(settings, artifact) if str(self.dtype) == f"torch.{named}" else self.dtype
