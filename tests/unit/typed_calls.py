"""What a type checker knows of calls; read by pyright in test_names.py, never run."""

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import regard as rg
from regard.inspect.report.texts import TextReports
from regard.inspect.results import FactResults

t, parameter, a = torch.zeros(2, 3), nn.Parameter(torch.zeros(2, 3)), np.zeros((2, 3))
assert_type(rg.attention(t, t, t, mask=rg.Causal()), Tensor)
assert_type(rg.attention(parameter, parameter, t), Tensor)
assert_type(rg.attention(a, a, a), np.ndarray[tuple[int, int], np.dtype[np.float64]])
assert_type(rg.attention_weights(t, t, rows=[0]), Tensor)
assert_type(rg.attention_weights(a, a), np.ndarray[tuple[int, int], np.dtype[np.float64]])
assert_type(rg.attention_scores(t, t), Tensor)
rg.attention("q", "k", "v")  # pyright: ignore[reportCallIssue, reportArgumentType]
rg.attention_weights(1.0, 2.0)  # pyright: ignore[reportCallIssue, reportArgumentType]

model: nn.Module = nn.Linear(2, 2)
assert_type(rg.look(t, t, facts=(rg.facts.Entropy(),)), FactResults)
assert_type(rg.look(rg.nn.MultiHeadAttention(8, heads=2), t), FactResults)
assert_type(rg.look(model, "a text"), rg.Report)
assert_type(rg.look(model, [1, 2, 3]), rg.Report)
assert_type(rg.look(model, ["a text", "another"]), TextReports)
assert_type(rg.look(model, a, processor=lambda images: images), rg.Report)
rg.look(t)  # pyright: ignore[reportCallIssue]
