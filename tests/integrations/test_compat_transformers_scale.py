"""Long sequences and compiled graphs: what a model on regard never builds, and that a compiler can follow it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tiny_models import DECODERS, padded, tokens

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from needed import needs_kernels
from regard.compat import transformers as compat

MEASURE = """
import contextlib, json, sys, torch
from transformers import LlamaConfig, LlamaModel
import regard as rg
import regard.compat.transformers

f = rg.facts
FACTS = f.MaxScore(), f.Entropy(), f.Top(8), f.Received(), f.Map(64, 64)

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def run(n):
    real = torch.ones(1, n, dtype=torch.long)
    real[:, 3:5] = 0  # a hole, so that the padding is no interval
    looking = rg.record(model, FACTS) if "record" in sys.argv else contextlib.nullcontext()
    with torch.no_grad(), looking:
        assert model(torch.arange(n)[None] % 9, attention_mask=real, use_cache=False).last_hidden_state.isfinite().all()

config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=1,
                     max_position_embeddings=8192, attn_implementation=sys.argv[1])
model = LlamaModel(config).eval()
run(64)
before = peak()
run(4096)
print(json.dumps(peak() - before))
"""


def growth(*asked: str) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", MEASURE, *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_nothing_of_n_squared_is_made() -> None:
    """At 4096 tokens even booleans of n × n would be 16.8 MB; transformers' sdpa makes them."""
    assert growth("regard") < 4096 * 4096 // 2
    assert growth("sdpa") > 4096 * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@needs_kernels
@pytest.mark.full
def test_all_facts_of_a_model_in_linear_memory() -> None:
    """Eager's weights of four layers would be 268 MB, each softmax as much again."""
    assert growth("regard", "record") < 4096 * 4096


@pytest.mark.full
def test_compiled_into_one_graph() -> None:
    model = DECODERS["Llama"].build(compat.NAME)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for real in (None, padded("left")):
        torch._dynamo.reset()
        expected = model(input_ids=tokens(), attention_mask=real, use_cache=False).logits
        found = compiled(input_ids=tokens(), attention_mask=real, use_cache=False).logits
        torch.testing.assert_close(found, expected)
        weight = model.model.layers[0].self_attn.q_proj.weight
        gradients = [torch.autograd.grad(out.square().sum(), weight)[0] for out in (found, expected)]
        torch.testing.assert_close(*gradients)
