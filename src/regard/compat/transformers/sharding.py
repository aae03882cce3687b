"""transformers' models over a group of processes: each has some tokens of the sequence, and attends to all."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.models.auto import modeling_auto
from typing_extensions import Self

from regard.compat.transformers.models import NAME
from regard.compat.transformers.sharded_mask import ShardedForward, begin, end
from regard.core.errors import ShapeError, Unsupported
from regard.core.shapes import count_of, listed
from regard.core.wrong_calls import kind_of
from regard.parallel.sequence import SequenceParallel
from regard.parallel.shards import shard

IGNORED = -100  # the label of a token that adds nothing to the loss
# What is of one token each: the heads of other classes read one token of the sequence, or all.
HEADS = (
    modeling_auto.MODEL_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)
REFUSED = {
    "past_key_values": "a cache holds this rank's keys alone. tree_decode reads one of which each rank has a part; "
    "generate in one process",
    "use_cache": "a cache would hold this rank's keys alone, and generate needs one. Generate in one process",
    "encoder_hidden_states": "the tokens of a second sequence are not sharded",
    "logits_to_keep": "the last tokens of the sequence are not the last ones of each rank. Leave it out",
    "output_router_logits": "the loss of the router is a mean over this rank's tokens. Leave it out",
}


@dataclass(eq=False, repr=False)
class Sharding:
    """A model whose sequence lies on the ranks of a group, until `remove()` or the end of a `with` block.

    parallel  which tokens each rank has, the group and the way; set it anew for sequences of another length
    """

    model: PreTrainedModel
    parallel: SequenceParallel
    former: str | None = None
    hooks: list[Any] = field(default_factory=list[Any])

    def batch(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of what a tokenizer gives: each tensor (batch, n, ...) sharded along n, others as they are.

        position_ids that are not given count from 0 to n - 1. labels (batch, n), as in one process, bring what makes
        `loss` this rank's share of the mean over all tokens: num_items_in_batch, and shift_labels of a causal model.
        Raises ShapeError where input_ids or inputs_embeds are not of parallel.shards.n tokens; Unsupported where the
        model counts positions by its padding, and position_ids are not given.
        """
        n, given = self.parallel.shards.n, dict(whole)
        name, ids = next(((name, given[name]) for name in ("input_ids", "inputs_embeds") if name in given), ("", None))
        if ids is None or ids.dim() < 2 or ids.shape[1] != n:
            came = "neither came" if ids is None else f"{name} has shape {listed(ids.shape)}"
            raise ShapeError(f"{came}; expected input_ids (batch, {n}) or inputs_embeds (batch, {n}, d) of all tokens.")
        if given.get("position_ids") is None:
            given["position_ids"] = self._positions(n, ids.device)
        labels = given.get("labels")
        if labels is not None:
            causal = self.model.loss_function is ForCausalLMLoss
            targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:] if causal else labels
            given.setdefault("num_items_in_batch", (targets != IGNORED).sum())
            if causal:
                given["shift_labels"] = targets
        rank, shards = self.parallel.rank, self.parallel.shards
        of_tokens = {name for name, x in given.items() if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == n}
        # transformers flattens some of them by view
        return {name: shard(x, shards, rank, 1).contiguous() if name in of_tokens else x for name, x in given.items()}

    def remove(self) -> None:
        """Gives the model its former attention; twice is once."""
        for hook in self.hooks:
            hook.remove()
        if self.hooks:
            self.model.set_attn_implementation(self.former or "eager")
        self.hooks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = repr(self.parallel) if self.hooks else "no longer sharded"
        return f"{type(self.model).__name__}: {state}"

    def _positions(self, n: int, device: torch.device) -> Tensor:
        for module in self.model.modules():
            by_mask = isinstance(module, nn.Embedding) and "attention_mask" in _parameters(module)
            if by_mask or hasattr(module, "create_position_ids_from_input_ids"):
                raise Unsupported(
                    f"{type(module).__name__} counts positions by itself, from the padding of all tokens; pass "
                    "position_ids (batch, n) of all tokens, as it would count them."
                )
        return torch.arange(n, device=device, dtype=torch.int64)[None]

    def _before(self, model: PreTrainedModel, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Checks what a forward is called with, and has the ranks exchange what is needed of the tokens of all."""
        name = type(model).__name__
        if torch.compiler.is_compiling():
            raise Unsupported(
                f"{name} is sharded, and messages between ranks are in no graph: leave torch.compile out."
            )
        signature = inspect.signature(type(model).forward)
        bound = signature.bind_partial(model, *args, **named).arguments
        given: dict[str, Any] = {**bound, **bound.get("kwargs", {})}
        for argument, why in REFUSED.items():
            value = given.get(argument)
            if value is not None and not (isinstance(value, int) and value == 0):
                raise Unsupported(f"{name} is sharded, and {argument} is given: {why}.")
        if 0 in self.parallel.shards.lengths:
            raise ValueError(
                f"{self.parallel.shards!r}: a rank has no tokens, and modules of transformers fail without any. Pass "
                "shards with a token on each rank, or a smaller group."
            )
        tokens = self.parallel.shards.lengths[self.parallel.rank]
        for argument in ("input_ids", "inputs_embeds", "position_ids", "attention_mask"):
            x = given.get(argument)
            if isinstance(x, Tensor) and (x.dim() != 2 + (argument == "inputs_embeds") or x.shape[1] != tokens):
                raise ShapeError(
                    f"{argument} has shape {listed(x.shape)}; expected (batch, {tokens}{', d' * (x.dim() == 3)}), this "
                    f"rank's tokens of {self.parallel.shards!r}. Sharding.batch(whole) makes them."
                )
        ids, mask = given.get("position_ids"), given.get("attention_mask")
        if ids is None or not isinstance(mask, Tensor | None):
            what = "position_ids is not given" if ids is None else f"attention_mask is {kind_of(mask)}"
            raise ValueError(
                f"{what}; expected tensors (batch, {tokens}): position_ids by which the model knows where this rank's "
                "tokens stand, and maybe attention_mask. Sharding.batch(whole) makes them."
            )
        if given.get("labels") is not None:
            self._check_loss(given)
        x = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        begin(ShardedForward.of(self.parallel, name, ids.expand(x.shape[0], -1), mask))
        return args, {**named, "use_cache": False} if "use_cache" in signature.parameters else named

    def _after(self, model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
        """Refuses an output that did not come by attention over the group alone. Called where forward fails, too."""
        forward = end()
        layers = model.config.get_text_config().num_hidden_layers
        if output is not None and forward is not None and forward.calls != layers:
            raise Unsupported(
                f"{type(model).__name__} has {count_of(layers, 'layer')}, of which {forward.calls} had their "
                "attention over the group: the others mix tokens by themselves, and would miss those of other ranks. "
                "Run it in one process."
            )

    def _check_loss(self, given: dict[str, Any]) -> None:
        """Unsupported for a loss that is a mean over this rank's tokens, ValueError for labels without their count."""
        loss, name = self.model.loss_function, type(self.model).__name__
        own = "loss_function" not in inspect.unwrap(type(self.model).forward).__code__.co_names
        if own or loss not in (ForCausalLMLoss, ForMaskedLMLoss):
            raise Unsupported(
                f"labels are given, and {name} computes a loss that is a mean over this rank's tokens. Leave labels "
                "out, and sum the losses of logits over the ranks."
            )
        needed = ("num_items_in_batch", *(("shift_labels",) if loss is ForCausalLMLoss else ()))
        missing = [argument for argument in needed if given.get(argument) is None]
        if missing:
            raise ValueError(
                f"labels are given without {' and '.join(missing)}: {name} would take the mean over this rank's tokens "
                "and shift labels within them. Sharding.batch(whole) makes them."
            )


def sharded(model: nn.Module, parallel: SequenceParallel) -> Sharding:
    """Makes a model of transformers, or a module with one, run on this rank's tokens and attend to those of all ranks.

    The model stays the same object. Its attention runs on regard, over the group of `parallel`, in each layer; mask
    (causal, windows, documents, padding), scaling, soft caps, sinks and grouped heads are those of the model. All ranks
    make the same call, each with its part of the batch: input_ids or inputs_embeds (batch, n_r, ...), position_ids, and
    with padding attention_mask (batch, n_r); `Sharding.batch` makes them from the whole batch. Outputs are this rank's
    rows of what one process computes with the same position_ids and use_cache=False.

    The loss, with labels, is this rank's share of one process's, and so are the gradients of parameters: sum both over
    the group. Dropout on the weights drops the same weights as one process with the seed of rank 0; each rank draws
    other dropout separately.

    Returns a Sharding: its `remove()`, or the end of a `with` block, undoes it. Raises Unsupported for parts of a model
    that need the tokens of other ranks: caches (so generate), masks made of tensors or of your own functions, biases by
    position (T5), layers that mix tokens without attention (state spaces, convolutions), heads that read one token
    (poolers, classifiers of sequences), encoder-decoders, a second sequence, and in a forward that torch.compile
    traces.

    >>> from regard.parallel import SequenceParallel, Shards
    >>> def train(model, texts, n, optimizer):  # in each process
    ...     with sharded(model, SequenceParallel(Shards.zigzag(n, torch.distributed.get_world_size()))) as part:
    ...         for whole in texts:
    ...             model(**part.batch(whole)).loss.backward()
    """
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    inner = {part for each in models for part in each.modules() if part is not each}
    outer = [each for each in models if each not in inner]
    if len(outer) != 1:
        raise ValueError(f"{type(model).__name__} holds {len(outer)} models of transformers; expected one.")
    found = outer[0]
    _refuse(found)
    sharding = Sharding(found, parallel, found.config._attn_implementation)  # pyright: ignore[reportPrivateUsage]
    found.set_attn_implementation(NAME)
    if found.config._attn_implementation != NAME:  # pyright: ignore[reportPrivateUsage]
        raise Unsupported(f"{type(found).__name__} computes attention by itself; it cannot run on regard.")
    sharding.hooks = [
        found.register_forward_pre_hook(sharding._before, with_kwargs=True),  # pyright: ignore
        found.register_forward_hook(sharding._after, always_call=True),  # pyright: ignore
    ]
    return sharding


def _refuse(model: PreTrainedModel) -> None:
    name, names = type(model).__name__, {each.__name__ for each in type(model).__mro__}
    known = {
        each for table in HEADS for entry in table.values() for each in ((entry,) if isinstance(entry, str) else entry)
    }
    pooler = next((type(part).__name__ for part in model.modules() if type(part).__name__.endswith("Pooler")), None)
    convolution = next((part for part in model.modules() if isinstance(part, nn.modules.conv._ConvNd)), None)  # pyright: ignore
    why = None
    if model.config.is_encoder_decoder:
        why = "has two sequences"
    elif getattr(model, "_is_stateful", False):
        why = "carries a state from token to token"
    elif convolution is not None:
        why = f"mixes tokens by {type(convolution).__name__}"
    elif pooler is not None:
        why = f"reads one token by {pooler} (add_pooling_layer=False builds it without)"
    elif not names & known:
        why = "is no base model, and no head for language modelling or for single tokens: it may read one token of all"
    elif "position_ids" not in _parameters(model):
        why = "takes no position_ids, so that it cannot know where a rank's tokens stand"
    elif "forward" in vars(model):
        why = "has a forward that is not its class's"
    if why is not None:
        raise Unsupported(f"{name} {why}. Over several processes, only attention may mix tokens; run it in one.")


def _parameters(module: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(type(module).forward).parameters
