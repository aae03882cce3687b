"""Facts: questions about the weights of attention. `look` and `record` answer them without the n × n weights.

Each fact is a value, and its docstring is its definition. For each query: Visible, Entropy, RelativeEntropy,
EffectiveKeys, Concentration, MaxScore, Top, Mass, SinkMass, Distance, Within, Offsets. For each key: Received,
MeanReceived, MaxReceived, Readers. Pooled: Map, ScoreMap, Histogram. The weights themselves: Rows, Columns, Quantised.
Weights times the norm that each key's value adds: Carried. The inputs of a recorded call: Inputs. Subclass Fact for
your own.

>>> import regard as rg, torch
>>> x = torch.zeros(4, 8)
>>> seen = rg.look(x, x, mask=rg.Causal(), facts=(rg.facts.EffectiveKeys(), rg.facts.Received()))
>>> seen[rg.facts.EffectiveKeys()].round(decimals=4)
tensor([1., 2., 3., 4.])
"""

from typing import TYPE_CHECKING

from regard.core.wrong_calls import no_name as _no_name
from regard.core.wrong_calls import public_names as _public_names
from regard.inspect.facts.algebra import Accumulator as Accumulator
from regard.inspect.facts.algebra import Fact as Fact
from regard.inspect.facts.algebra import ScoreTile as ScoreTile
from regard.inspect.facts.algebra import Sum as Sum
from regard.inspect.facts.algebra import by_key as by_key
from regard.inspect.facts.algebra import by_row as by_row
from regard.inspect.facts.algebra import room as room
from regard.inspect.facts.carried import Carried as Carried
from regard.inspect.facts.chosen import Columns as Columns
from regard.inspect.facts.chosen import Rows as Rows
from regard.inspect.facts.inputs import Inputs as Inputs
from regard.inspect.facts.keys import MaxReceived as MaxReceived
from regard.inspect.facts.keys import MeanReceived as MeanReceived
from regard.inspect.facts.keys import Readers as Readers
from regard.inspect.facts.keys import Received as Received
from regard.inspect.facts.places import Distance as Distance
from regard.inspect.facts.places import Mass as Mass
from regard.inspect.facts.places import Offsets as Offsets
from regard.inspect.facts.places import SinkMass as SinkMass
from regard.inspect.facts.places import Within as Within
from regard.inspect.facts.pooled import Histogram as Histogram
from regard.inspect.facts.pooled import Map as Map
from regard.inspect.facts.pooled import ScoreCells as ScoreCells
from regard.inspect.facts.pooled import ScoreMap as ScoreMap
from regard.inspect.facts.quantised import Quantised as Quantised
from regard.inspect.facts.quantised import dequantise as dequantise
from regard.inspect.facts.rows import Concentration as Concentration
from regard.inspect.facts.rows import EffectiveKeys as EffectiveKeys
from regard.inspect.facts.rows import Entropy as Entropy
from regard.inspect.facts.rows import MaxScore as MaxScore
from regard.inspect.facts.rows import Peak as Peak
from regard.inspect.facts.rows import RelativeEntropy as RelativeEntropy
from regard.inspect.facts.rows import Top as Top
from regard.inspect.facts.rows import TopKeys as TopKeys
from regard.inspect.facts.rows import Visible as Visible

_NAMES = dict.fromkeys(("TopK", "KTop", "Heaviest"), "it is Top(k), which answers with TopKeys")

if not TYPE_CHECKING:  # which would take every name for one of this module

    def __dir__() -> list[str]:
        """The public names: what completion shows."""
        return _public_names(globals())

    def __getattr__(name: str) -> object:
        """AttributeError, with the names that are near."""
        raise _no_name(__name__, name, _public_names(globals()), _NAMES)
