"""Labels: the texts of the tokens, and which call reads which of two sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from regard.core.shapes import count_of
from regard.inspect.layers import Layers, chosen, some
from regard.inspect.report.element import Looked
from regard.inspect.report.layer import Layer
from regard.inspect.report.steps import Steps
from regard.inspect.stacks import reads_another


@dataclass(frozen=True)
class Labels:
    """The caller's texts: of the queries' sequence, and of another sequence that some layers read (cross-attention).

    cross  the layers that read the other sequence, by name; None: by shapes, and by names where these leave it open
    """

    tokens: Sequence[str]
    key_tokens: Sequence[str]
    cross: Layers | None

    def crosses(self, calls: Sequence[Looked]) -> Callable[[Looked], bool]:
        """The question whether a call is of queries of `tokens` on keys of `key_tokens`.

        By shapes it is where a call has as many keys as there are key_tokens, another number of queries, and the
        queries of all such calls of a layer are the tokens, once or several times. Raises ValueError where `cross` fits
        no layer.
        """
        by_name = dict[str, list[Looked]]()
        for call in calls:
            by_name.setdefault(call.name, []).append(call)
        if self.cross is not None:
            said = chosen(self.cross, by_name, "cross", "layer of this recording")
            return lambda call: said(call.name)
        found = set[int]()
        for of_layer in by_name.values():
            fit = [call for call in of_layer if self._keys_fit(call)]
            asking = sum(call.view.frame.nq for call in fit)
            if asking % len(self.tokens) == 0 if self.tokens else len(fit) == len(of_layer):
                found.update(map(id, fit))
        return lambda call: id(call) in found or (reads_another(call.name) and not self._settled(call))

    def _keys_fit(self, call: Looked) -> bool:
        frame = call.view.frame
        return bool(self.key_tokens) and frame.nk == len(self.key_tokens) and frame.nq != frame.nk

    def _settled(self, call: Looked) -> bool:
        """Whether the lengths of both texts say that a call is of one sequence."""
        frame, n = call.view.frame, len(self.tokens)
        return bool(self.key_tokens) and n != len(self.key_tokens) and frame.nq == frame.nk == n

    def own(self, steps: Steps, place: str) -> Sequence[str]:
        """The texts of the sequence that a layer's queries stand in: key_tokens in the encoder's layers."""
        n = len(self.key_tokens)
        if steps.cross or not n or n not in steps.sizes:
            return self.tokens
        if len(self.tokens) in steps.sizes:  # both fit
            return self.key_tokens if n == len(self.tokens) and place.startswith("encoder") else self.tokens
        return self.key_tokens

    def check_counts(self, layers: Iterable[Steps]) -> None:
        """Raises ValueError for a list of texts if no call has that number of tokens."""
        counts = sorted({n for steps in layers for n in steps.sizes})
        for name, texts in (("tokens", self.tokens), ("key_tokens", self.key_tokens)):
            if texts and counts and len(texts) not in counts:
                raise ValueError(
                    f"{name} has {count_of(len(texts), 'text', ',')}; the calls are of "
                    f"{' and '.join(f'{n:,}' for n in counts)} tokens. Pass one text a token, special ones such as "
                    "[CLS] included."
                )

    def check_used(self, layers: Sequence[Layer], steps: Sequence[Steps]) -> None:
        """ValueError for texts that name no token of any layer: the report would leave them out without a word."""
        sizes = some(list(dict.fromkeys(f"{each.sizes[0]:,} on {each.sizes[1]:,}" for each in steps)))
        named = list[Sequence[str]]()
        for layer, each in zip(layers, steps, strict=True):
            own = self.own(each, layer.place)
            named += [own] if layer.queries.tokens or (layer.keys.tokens and layer.looks_at_itself) else []
            named += [self.key_tokens] if layer.keys.tokens and not layer.looks_at_itself else []
        if self.tokens and not any(texts is self.tokens for texts in named):
            raise ValueError(
                f"tokens has {count_of(len(self.tokens), 'text', ',')}, and no layer has as many queries of one "
                f"sequence; the layers are of {sizes} (queries on keys). Pass one text a query, or a key."
            )
        another = list(self.key_tokens) != list(self.tokens)
        if self.key_tokens and another and not any(texts is self.key_tokens for texts in named):
            names = some(list(dict.fromkeys(layer.name for layer in layers)))
            raise ValueError(
                f"key_tokens has {count_of(len(self.key_tokens), 'text', ',')}, and no layer is known to read such a "
                f"sequence; the layers are of {sizes} (queries on keys). Leave key_tokens out, or say which layers "
                f"read it: cross='*', or a pattern of names ({names})."
            )
