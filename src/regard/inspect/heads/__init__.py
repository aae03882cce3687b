"""Heads: what each one adds to the residual stream and to a logit, the loss without it, and its kind.

>>> from regard.demo.model import load
>>> print(contributions(load(), list(b"to be or not to b")))
norm of what a head adds, mean of 17 tokens
...
"""

from typing import TYPE_CHECKING

from regard.core.wrong_calls import no_name as _no_name
from regard.core.wrong_calls import public_names as _public_names
from regard.inspect.heads.ablation import Ablation as Ablation
from regard.inspect.heads.ablation import ablation as ablation
from regard.inspect.heads.carried import CarriedNorms as CarriedNorms
from regard.inspect.heads.carried import carried as carried
from regard.inspect.heads.circuits import Circuits as Circuits
from regard.inspect.heads.circuits import circuits as circuits
from regard.inspect.heads.contributions import Contributions as Contributions
from regard.inspect.heads.contributions import Logit as Logit
from regard.inspect.heads.contributions import contributions as contributions
from regard.inspect.heads.probe import Probe as Probe
from regard.inspect.heads.probe import probe as probe
from regard.inspect.heads.token_table import TokenTable as TokenTable
from regard.inspect.heads.value_norms import value_norms as value_norms
from regard.inspect.report.carried_layer import CarriedLayer as CarriedLayer

_PROBE = "it is regard.heads.probe(model), which measures each head on random tokens"
_NAMES = {
    **dict.fromkeys(("induction", "induction_heads", "previous_token", "duplicate_token", "detect_heads"), _PROBE),
    **dict.fromkeys(("logit_attribution", "logit_lens", "dla"), "it is regard.heads.contributions(model, text)"),
    **dict.fromkeys(("ov", "qk", "ov_circuit", "qk_circuit"), "it is regard.heads.circuits(model, text)"),
}

if not TYPE_CHECKING:  # which would take every name for one of this module

    def __dir__() -> list[str]:
        """The public names: what completion shows."""
        return _public_names(globals())

    def __getattr__(name: str) -> object:
        """AttributeError, with the names that are near."""
        raise _no_name(__name__, name, _public_names(globals()), _NAMES)
