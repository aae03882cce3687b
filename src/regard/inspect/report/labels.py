"""Labels: the texts of the tokens, and which call reads which of two sequences."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from regard.core.shapes import count_of
from regard.inspect.layers import Layers, chosen, some
from regard.inspect.report.element import Looked
from regard.inspect.report.layer import Layer
from regard.inspect.report.steps import Steps


@dataclass(frozen=True)
class Labels:
    """The caller's texts: of the queries' sequence, and of another sequence that some layers read (cross-attention).

    cross    the layers that read the other sequence, by name; None: by the calls' kinds, then by lengths
    encoder  the layers of the other sequence itself, by name; None: likewise
    """

    tokens: Sequence[str]
    key_tokens: Sequence[str]
    cross: Layers | None
    encoder: Layers | None

    def crosses(self, calls: Sequence[Looked]) -> Callable[[Looked], bool]:
        """The question whether a call is of queries of `tokens` on keys of `key_tokens`.

        Where neither `cross` nor the call's kind says it, it is by lengths: the call has as many keys as there are
        key_tokens, another number of queries, and the queries of all such calls of a layer are the tokens, once or
        several times. Raises ValueError where `cross` fits no layer.
        """
        by_name = dict[str, list[Looked]]()
        for call in calls:
            by_name.setdefault(call.name, []).append(call)
        if self.cross is not None:
            said = _named(self.cross, by_name, "cross")
            return lambda call: said(call.name)
        found = set[int]()
        for of_layer in by_name.values():
            fit = [call for call in of_layer if call.kind == "unknown" and self._keys_fit(call)]
            asking = sum(call.view.frame.nq for call in fit)
            if asking % len(self.tokens) == 0 if self.tokens else len(fit) == len(of_layer):
                found.update(map(id, fit))
        return lambda call: call.kind == "cross" or id(call) in found

    def _keys_fit(self, call: Looked) -> bool:
        frame = call.view.frame
        return bool(self.key_tokens) and frame.nk == len(self.key_tokens) and frame.nq != frame.nk

    def of_queries(self, layers: Sequence[Steps]) -> list[Sequence[str]]:
        """The texts of the sequence that each layer's queries stand in: key_tokens in the encoder's layers.

        A self-attention that either text fits has the tokens; a UserWarning says so where nothing else tells them
        apart. Raises ValueError where `encoder` fits no layer.
        """
        crossed = any(steps.cross for steps in layers)
        if self.encoder is not None:
            said = _named(self.encoder, [steps.name for steps in layers], "encoder")
            encoder = [not steps.cross and said(steps.name) for steps in layers]
        else:
            encoder = [not steps.cross and crossed and steps.kind == "encoder" for steps in layers]
            if crossed and not any(encoder):
                self._warn_of_two([steps.name for steps in layers if not steps.cross and self._both_fit(steps)])
        return [self.key_tokens if own else self._by_length(steps) for steps, own in zip(layers, encoder, strict=True)]

    def _by_length(self, steps: Steps) -> Sequence[str]:
        fits = [texts for texts in (self.tokens, self.key_tokens) if texts and len(texts) in steps.sizes]
        return fits[0] if fits and not steps.cross else self.tokens

    def _both_fit(self, steps: Steps) -> bool:
        n = len(self.tokens)
        return bool(n) and n == len(self.key_tokens) and n in steps.sizes and list(self.tokens) != list(self.key_tokens)

    def _warn_of_two(self, names: list[str]) -> None:
        if names:
            warnings.warn(
                f"tokens and key_tokens have {count_of(len(self.tokens), 'text', ',')} each, so lengths do not say "
                f"whose self-attention {' and '.join(dict.fromkeys(names))} are; they have the tokens. Report.of takes "
                "encoder=, the layers that have the key_tokens (a pattern); encoder=() says that none has.",
                stacklevel=5,
            )

    def warn_of_assumed(self, layers: Iterable[Steps]) -> None:
        """A UserWarning for queries fewer than the keys that may be of one sequence with them, or of another."""
        for steps in layers:
            nq, nk = steps.sizes
            if self.cross is None and steps.kind == "unknown" and not steps.cross and steps.assumed:
                if nk in (len(self.tokens), len(self.key_tokens)):  # the texts of one sequence, whose end asks
                    continue
                warnings.warn(
                    f"{steps.name} has {count_of(nq, 'query', ',')} on {count_of(nk, 'key', ',')}, and nothing says "
                    "whether they are of one sequence; the queries are taken for the last "
                    f"{nq:,} of these {nk:,} tokens. Pass Report.of cross={steps.name!r} if the keys are another "
                    "sequence, cross=() if they are not.",
                    stacklevel=4,
                )

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

    def check_used(self, layers: Sequence[Layer], steps: Sequence[Steps], of_queries: Sequence[Sequence[str]]) -> None:
        """ValueError for texts that name no token of any layer: the report would leave them out without a word."""
        sizes = some(list(dict.fromkeys(f"{each.sizes[0]:,} on {each.sizes[1]:,}" for each in steps)))
        named = list[Sequence[str]]()
        for layer, own in zip(layers, of_queries, strict=True):
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


def _named(layers: Layers, names: Iterable[str], argument: str) -> Callable[[str], bool]:
    """The question whether a layer is meant; () means none."""
    return chosen(layers, names, argument, "layer of this recording") if layers != () else lambda name: False
