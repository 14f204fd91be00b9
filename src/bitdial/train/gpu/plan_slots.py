"""Plan slots: where a recorded step finds the scales and norms of the plan that it runs.

A sampled plan picks one of several sets for each norm and each activation scale, others at every step; a recorded CUDA
graph works on the same addresses every time. So all sets lie in one tensor, `sets`, of which the model's parameters and
statistics and the optimizers' moments are views, and each norm and scale has one slot. Before a pass one gather brings
what the plan picks to the slots, by an index on the device; the pass and its update work there; one scatter takes it
back. Sets that were not picked keep their values, moments and steps, as separate parameters without a gradient do.
"""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.dial.dial import set_bits
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.kernels.width_table import ActivationCodes, WeightCodes
from bitdial.nn import ActivationSite, QuantLayer, SwitchableBatchNorm
from bitdial.train.config import TrainConfig
from bitdial.train.gpu.fuse import FastModel
from bitdial.train.optimizers import make_optimizer

ADAM = ("step", "exp_avg", "exp_avg_sq")
ALIGNED = 4  # elements
STATES = {"adam": ADAM, "adamw": ADAM, "sgd": ("momentum_buffer",)}


class LayerSlot:
    """The scales of a quantised layer at the widths that the plan picks, and how the kernels quantise with them."""

    def __init__(self, layer: QuantLayer, weight_choice: Tensor, act_choice: Tensor):
        self.layer, self.weight_choice, self.act_choice = layer, weight_choice, act_choice
        self.weight_scale = cast(Tensor, layer.weight_quantizer.learned_scale(layer.bit_choices[0]))
        self.act_scale: Tensor | None = None

    def weight_codes(self) -> WeightCodes:
        """How to quantise the weight."""
        quantizer, weight = self.layer.weight_quantizer, self.layer.weight
        each = [quantizer.settings(weight, bits) for bits in self.layer.bit_choices]
        widths = [(s["high"], s["low"], s["gradient_scale"]) for s in each]
        return WeightCodes.one_of(
            self.weight_scale, widths, self.weight_choice, scheme=quantizer.scheme, ties=quantizer.ties
        )

    def act_codes(self, x: Tensor) -> ActivationCodes:
        """How to quantise the input, if it is like `x`."""
        quantizer = self.layer.act_quantizer
        assert quantizer is not None
        assert self.act_scale is not None
        widths = [(bits, quantizer.gradient_scale(x, bits)) for bits in self.layer.bit_choices]
        return ActivationCodes.one_of(self.act_scale, widths, self.act_choice, kind=quantizer.kind)


class _Family(NamedTuple):
    """Tensors of one shape, of which the number in a column of the choices says the one that the slot is for."""

    column: int
    sets: list[Tensor]
    slot: Tensor


class PlanSlots:
    """The slots of a model whose steps run sampled plans.

    A step: `choose` the plans of its passes; then for each of them `gather`, the pass and its update, `scatter`. Only
    `choose` looks at Python values; the others may be recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        fast: FastModel,
        config: TrainConfig,
        *,
        weight_optimizer: torch.optim.Optimizer,
        scale_optimizer: torch.optim.Optimizer | None,
    ):
        self.model = model
        self.norms = [m for m in model.modules() if isinstance(m, SwitchableBatchNorm)]
        layers = [m for m in model.modules() if isinstance(m, QuantLayer)]
        self.bit_choices = layers[0].bit_choices
        device = layers[0].weight.device
        # A column for each weight scale and activation scale, then for each norm's weight and bias, then statistics.
        self.current = torch.zeros(2 * len(layers) + 2 * len(self.norms), dtype=torch.int64, device=device)
        self.choices = self.current.repeat(len(self.bit_choices), 1)
        self.layers: dict[nn.Module, LayerSlot] = {}
        self.stand_ins: dict[nn.Module, nn.Module] = {}
        self.weights: list[_Family] = []
        self.scales: list[_Family] = []
        self.statistics: list[_Family] = []
        for number, layer in enumerate(layers):
            self._add_layer(layer, 2 * number)
        for number, norm in enumerate(self.norms, start=2 * len(layers)):
            self._add_norm(norm, number)

        kind, decay = config.optimizer, config.weight_decay
        weights, scales = self.parameters()
        self._steppers: list[tuple[list[_Family], str, torch.optim.Optimizer, torch.optim.Optimizer]] = []
        self.weight_optimizer = make_optimizer(kind, weights, lr=config.lr, weight_decay=decay) if weights else None
        if self.weight_optimizer is not None:
            self._steppers.append((self.weights, kind, weight_optimizer, self.weight_optimizer))
        self.scale_optimizer = make_optimizer("adam", scales, lr=config.lr) if scales else None
        if self.scale_optimizer is not None and scale_optimizer is not None:
            self._steppers.append((self.scales, "adam", scale_optimizer, self.scale_optimizer))
        self.rebind()
        fast.slots |= {**self.layers, **self.stand_ins}

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters in slots that learn: those of norms, and scales."""
        weights, scales = ([cast(nn.Parameter, f.slot) for f in group] for group in (self.weights, self.scales))
        return [p for p in weights if p.requires_grad], scales

    def _add_layer(self, layer: QuantLayer, column: int) -> None:
        choices = (self.current[column : column + 1], self.current[column + 1 : column + 2])
        slot = self.layers[layer] = LayerSlot(layer, *choices)
        weight, act = layer.weight_quantizer, layer.act_quantizer
        if weight.rule.has_scale_per_width:
            slot.weight_scale = _slot(self.scales, column, [weight.scales[str(b)] for b in layer.bit_choices])
        if act is not None:
            slot.act_scale = _slot(self.scales, column + 1, [act.scales[str(b)] for b in layer.bit_choices])

    def _add_norm(self, norm: SwitchableBatchNorm, column: int) -> None:
        stand_in = self.stand_ins[norm] = copy.deepcopy(norm.active).train()
        for part in ("weight", "bias"):
            parameters = [norm.sets[name].get_parameter(part) for name in norm.holders(part)]
            setattr(stand_in, part, _slot(self.weights, column, parameters))
        for part in ("running_mean", "running_var"):
            buffers = [norm.sets[name].get_buffer(part) for name in norm.holders(part)]
            self.statistics.append(_Family(column + len(self.norms), buffers, stand_in.get_buffer(part)))

    def rebind(self) -> None:
        """Make the tensors of model and optimizers views of `sets`; again after tensors were replaced by others."""
        families = [*self.weights, *self.scales, *self.statistics]
        for group, kind, theirs, mine in self._steppers:
            for family, name in ((f, n) for f in group if f.slot.requires_grad for n in STATES[kind]):
                sets = [_state(theirs, parameter, name) for parameter in family.sets]
                families.append(_Family(family.column, sets, _state(mine, family.slot, name)))
        device = self.current.device
        self.sets = _joined([tensor for family in families for tensor in family.sets], device)
        self.in_slots = _joined([family.slot for family in families], device)
        starts, strides, columns, start = [torch.arange(0)], [], [], 0
        for column, sets, slot in families:
            size = _room(slot)
            starts.append(start + torch.arange(size))
            strides += [size] * size
            columns += [column] * size
            start += len(sets) * size
        self._starts, self._strides, self._columns = (
            torch.as_tensor(v, dtype=torch.int64, device=device) for v in (torch.cat(starts), strides, columns)
        )
        self._index = self._starts.clone()
        counts = [norm.sets[name].get_buffer("num_batches_tracked") for norm in self.norms for name in norm.set_names()]
        self.counts = _joined(counts, device)
        sizes = [len(norm.set_names()) for norm in self.norms]
        self._first_counts = torch.tensor([ALIGNED * sum(sizes[:i]) for i in range(len(sizes))], device=device)
        self._ones = torch.ones_like(self._first_counts)

    def choose(self, plans: Iterable[LayerBits | BitPlan]) -> None:
        """Say what the passes of the next step run."""
        rows = []
        for plan in plans:
            set_bits(self.model, plan)
            pairs = ((slot.layer.weight_bits, slot.layer.act_bits) for slot in self.layers.values())
            layers = [self.bit_choices.index(bits) for pair in pairs for bits in pair]
            norms = [norm.row(part) for part in ("weight", "running_mean") for norm in self.norms]
            rows.append([*layers, *norms])
        self.choices.copy_(torch.tensor(rows))

    @torch.no_grad()
    def gather(self, number: int) -> None:
        """Bring what pass `number` runs to the slots."""
        self.current.copy_(self.choices[number])
        torch.add(self._starts, self._strides * self.current[self._columns], out=self._index)
        torch.index_select(self.sets, 0, self._index, out=self.in_slots)

    @torch.no_grad()
    def scatter(self) -> None:
        """Take what has changed back."""
        self.sets.index_copy_(0, self._index, self.in_slots)
        if self.norms:
            at = self._first_counts + ALIGNED * self.current[-len(self.norms) :]
            self.counts.index_add_(0, at, self._ones)


def unsupported_reason(model: nn.Module, fast: FastModel, config: TrainConfig) -> str | None:
    """Why `model` cannot have slots; None if it can."""
    layers = [m for m in model.modules() if isinstance(m, QuantLayer)]
    norms = [m for m in model.modules() if isinstance(m, SwitchableBatchNorm)]
    quantizers = [q for layer in layers for q in (layer.weight_quantizer, layer.act_quantizer) if q is not None]
    if any(isinstance(m, ActivationSite) for m in model.modules()):
        return "the products of an attention are quantised"
    if not fast.covers([*layers, *norms]):
        return "a layer or norm is not on the fast path"
    if not all(layer.weight_quantizer.learns_row_scales for layer in layers):
        return "the scheme derives its scales from the weights, or they belong to groups of inputs"
    if any(layer.act_quantizer is not None and layer.act_quantizer.kind == "asymmetric" for layer in layers):
        return "activations have zero-points"
    if any(layer.act_quantizer is not None and layer.act_quantizer.kind == bf.DYNAMIC for layer in layers):
        return "activations have a scale for each token"
    if len(set(quantizers)) < len(quantizers):
        return "layers share a quantizer"
    if any(p.dtype != torch.float32 for m in (*quantizers, *norms) for p in m.parameters()):
        return "scales or norms are not in float32"
    sets = [each for norm in norms for each in norm.sets.values()]
    if not all(each.affine and each.track_running_stats and each.momentum is not None for each in sets):
        return "a norm has no parameters, no statistics, or statistics without a momentum"
    if config.update != "separate" or config.scale_state != "shared":
        return "it needs update='separate' and scale_state='shared'"
    return None


def _slot(group: list[_Family], column: int, sets: Iterable[Any]) -> nn.Parameter:
    """A slot for the parameters `sets`, noted in `group`."""
    tensors = list(sets)
    slot = nn.Parameter(torch.zeros_like(tensors[0]), requires_grad=tensors[0].requires_grad)
    group.append(_Family(column, tensors, slot))
    return slot


def _state(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str) -> Tensor:
    """The state `name` that `optimizer` has for `parameter`; 0 if it has not stepped yet."""
    state = optimizer.state[parameter]
    if state.get(name) is None:
        state[name] = torch.zeros_like(parameter, requires_grad=False) if name != "step" else parameter.new_zeros(())
    return cast(Tensor, state[name])


def _room(tensor: Tensor) -> int:
    """Elements that `tensor` takes where tensors are joined: each begins where the vector loads of kernels may."""
    return -(-tensor.numel() // ALIGNED) * ALIGNED


def _joined(tensors: list[Tensor], device: torch.device) -> Tensor:
    """All `tensors` in one, of which they become views."""
    dtype = tensors[0].dtype if tensors else torch.float32
    whole = torch.zeros(sum(map(_room, tensors)), dtype=dtype, device=device)
    start = 0
    for tensor in tensors:
        view = whole[start : start + tensor.numel()].view(tensor.shape)
        tensor.data = view.copy_(tensor.detach())
        start += _room(tensor)
    return whole
