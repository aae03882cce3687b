"""AOTInductor: a package of a model with regard's kernels, run in a process of its own, for lengths it has not seen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from needed import needs_kernels

pytestmark = [
    pytest.mark.full,
    needs_kernels,
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler for AOTInductor"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own
]
LENGTHS = (7, 40, 300)
RUN = """
import sys, torch
import {imported}
run = torch._inductor.aoti_load_package(sys.argv[1])
with torch.no_grad():
    torch.save([run(*given) for given in torch.load(sys.argv[2])], sys.argv[3])
"""


class Model(nn.Module):
    """Regard's layer, calls whose masks are lengths and no intervals, and torch's layer under a patch."""

    def __init__(self) -> None:
        super().__init__()
        score = rg.ScaledDot() >> rg.Alibi(rg.Alibi.geometric(4)) >> rg.SoftCap(20.0)
        self.own = rg.nn.MultiHeadAttention(16, 4, score=score)
        self.theirs = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x + self.own(x, mask=rg.Causal() | rg.Prefix(3))
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        for mask in (rg.Lengths(keys=lengths) & rg.Causal(), rg.Dilated(3) & rg.Window(9, 0)):
            heads = heads + rg.attention(heads, heads, heads, mask=mask)
        return self.theirs(heads.transpose(1, 2).flatten(2))


def run_elsewhere(folder: Path, package: str, imported: str) -> subprocess.CompletedProcess[str]:
    files = (package, str(folder / "inputs.pt"), str(folder / "outputs.pt"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RUN.format(imported=imported), *files]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_package_runs_in_a_process_that_has_imported_regard(tmp_path: Path) -> None:
    model, n = Model().eval(), torch.export.Dim("n", min=3, max=4096)
    example = (torch.randn(2, 50, 16), torch.tensor([50, 20]))
    with torch.no_grad(), rg.patch(report=None) as patch:
        program = torch.export.export(model, example, dynamic_shapes={"x": {1: n}, "lengths": None})
    assert {name for name, why in patch.traced if why is None} == {"multi_head_attention_forward"}
    assert sum("regard.forward" in str(node.target) for node in program.graph.nodes) == 4
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))

    given = [(torch.randn(2, length, 16), torch.tensor([length, length // 2])) for length in LENGTHS]
    torch.save(given, tmp_path / "inputs.pt")
    done = run_elsewhere(tmp_path, package, "regard")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = [model(*one) for one in given]
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt"), expected, atol=1e-5, rtol=1e-4)

    without = run_elsewhere(tmp_path, package, "json")
    assert without.returncode and "regard::forward" in without.stderr
