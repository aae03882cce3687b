"""Heads: what each adds to the residual stream and to a logit, the loss without it, and which kind it is of.

>>> from regard.demo.model import load
>>> print(contributions(load(), list(b"to be or not to b")))
norm of what a head adds, mean of 17 tokens
...
"""

from regard.inspect.heads.ablation import Ablation as Ablation
from regard.inspect.heads.ablation import ablation as ablation
from regard.inspect.heads.contributions import Contributions as Contributions
from regard.inspect.heads.contributions import Logit as Logit
from regard.inspect.heads.contributions import contributions as contributions
from regard.inspect.heads.probe import Probe as Probe
from regard.inspect.heads.probe import probe as probe
