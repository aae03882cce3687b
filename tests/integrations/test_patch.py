"""regard.patch: models that call torch's attention run on regard, and torch's functions come back."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard as rg
from regard.compat.torch.holders import Holders
from regard.compat.torch.routes import HOMES, TORCHS
from regard.inspect.results import FactResults

SDPA, MHA, FLEX = TORCHS


def here() -> tuple[object, ...]:
    """What a patch replaces."""
    functions = (getattr(home, name) for name, home in HOMES.items())
    return *functions, torch.backends.mha.get_fastpath_enabled()


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Iterator[None]:
    before = here()
    yield
    assert here() == before == (*TORCHS.values(), True)


class Plain(nn.Module):
    """Attention as most models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True), 2)


def transformer() -> nn.Module:
    return Both(nn.Transformer(12, 2, 1, 2, 24, dropout=0.0, batch_first=True))


class Both(nn.Module):
    """An encoder and decoder of one sequence, causal in the decoder."""

    def __init__(self, model: nn.Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]), tgt_is_causal=True)


X = torch.randn(2, 7, 12)
MODELS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "plain": (Plain, SDPA, 1),
    "encoder": (encoder, MHA, 2),
    "transformer": (transformer, MHA, 5),
}


def results(model: nn.Module, x: Tensor = X) -> tuple[Tensor, ...]:
    out = model(x)
    return (out, *torch.autograd.grad(out.square().sum(), list(model.parameters())))


@pytest.mark.parametrize(("build", "name", "count"), MODELS.values(), ids=MODELS.keys())
def test_outputs_and_gradients(build: Callable[[], nn.Module], name: str, count: int) -> None:
    model = build()
    expected = results(model)
    for given in (None, model):
        with rg.patch(given, report=None) as patch:
            found = results(model)
        assert dict(patch.calls) == {(name, None): count}
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        expected = model.eval()(X)
        with rg.patch(report=None) as patch:
            torch.testing.assert_close(model(X), expected, atol=1e-5, rtol=1e-4)
    assert patch.calls[name, None] == count


def test_under_autocast() -> None:
    model = encoder()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(X)
        with rg.patch(report=None) as patch:
            torch.testing.assert_close(model(X), expected, atol=0.05, rtol=0.05)
    assert dict(patch.calls) == {(MHA, None): 2}


def test_a_model_alone_until_it_is_restored() -> None:
    model, other = Plain(), Plain()
    patch = rg.patch(model)
    model(X), other(X)
    assert here() == (*TORCHS.values(), True)  # outside of the model's forward
    assert patch.calls.total() == 1
    patch.restore()
    patch.restore()
    model(X)
    assert patch.calls.total() == 1 and "forward" not in vars(model)


def test_a_copy_of_a_patched_model_has_its_own_parameters(tmp_path: pathlib.Path) -> None:
    model = encoder()
    with rg.patch(model, report=None) as patch:
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        with torch.no_grad():
            for weight in twin.parameters():
                weight.zero_()
        assert twin(X).eq(0).all() and not model(X).eq(0).all()
        with rg.patch(twin, report=None) as other:
            assert twin(X).eq(0).all()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(loaded(X), model(X))
    assert twin(X).eq(0).all() and twin.forward.__self__ is twin
    assert patch.calls.total() == other.calls.total() == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_is_patched_twice_counts_by_the_last(first: bool) -> None:
    """A cell of a notebook that ran again."""
    model = Plain()
    patches = [rg.patch(model, report=None) for _ in range(2)]
    model(X)
    left = patches.pop(0 if first else 1)
    left.restore()
    model(X)
    assert [left.calls.total(), patches[0].calls.total()] == ([0, 2] if first else [1, 1])
    patches[0].restore()
    assert "forward" not in vars(model)


def test_nested_blocks_count_by_the_innermost() -> None:
    model = Plain()
    with rg.patch(report=None) as outer:
        model(X)
        with rg.patch(model, report=None) as inner:
            model(X), model(X)
        with rg.patch(report=None) as innermost:
            model(X)
        model(X)
    assert [p.calls.total() for p in (outer, inner, innermost)] == [2, 2, 1]


def test_an_error_restores() -> None:
    model = Plain()
    with pytest.raises(RuntimeError), rg.patch(report=None):
        F.scaled_dot_product_attention(X, X[..., :5], X)
    with pytest.raises(RuntimeError), rg.patch(model, report=None):
        model(X[..., :5])
    assert here() == (*TORCHS.values(), True) and "forward" not in vars(model)


def test_names_that_a_module_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("somebodys_layers")
    module.__dict__["attend"] = F.scaled_dot_product_attention
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with rg.patch(report=None) as patch:
        kept = module.attend
        kept(X, X, X)
    assert patch.calls == {(SDPA, None): 1}
    assert module.attend is F.scaled_dot_product_attention
    torch.testing.assert_close(kept(X, X, X), module.attend(X, X, X))  # whoever kept it has torch's again
    assert patch.calls.total() == 1


def holders_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> types.ModuleType:
    """A loaded module that a patch has searched, with torch's function under these names."""
    module = types.ModuleType("somebodys_layers")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__.update(dict.fromkeys(names, F.scaled_dot_product_attention), other=len)
    with rg.patch(report=None):
        pass
    return module


def test_installed_modules_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    holders_of(monkeypatch, "attend")
    searched: list[str] = []
    of = Holders._of
    monkeypatch.setattr(Holders, "_of", lambda self, module: searched.append(module.__name__) or of(self, module))
    with rg.patch(report=None), rg.patch(report=None):
        pass
    assert searched.count("somebodys_layers") == 2
    assert not {"sys", "json", "pytest", "_pytest.fixtures"} & set(searched)


@pytest.mark.parametrize("held", [(), ("attend",)], ids=["a name more", "a name for another"])
@pytest.mark.parametrize("name", ["new", "other"])
def test_names_that_are_bound_after_a_search(monkeypatch: pytest.MonkeyPatch, held: tuple[str, ...], name: str) -> None:
    module = holders_of(monkeypatch, *held)
    for old in held:
        delattr(module, old)
    setattr(module, name, F.scaled_dot_product_attention)
    with rg.patch(report=None) as patch:
        getattr(module, name)(X, X, X)
    assert patch.calls == {(SDPA, None): 1}
    assert getattr(module, name) is F.scaled_dot_product_attention


def test_a_module_that_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = holders_of(monkeypatch, "attend"), types.ModuleType("somebodys_layers")
    monkeypatch.setitem(sys.modules, again.__name__, again)
    again.__dict__["attend"] = first.__dict__.pop("attend")
    with rg.patch(report=None) as patch:
        again.attend(X, X, X)
    assert patch.calls == {(SDPA, None): 1}


def two_masks() -> None:
    with contextlib.suppress(RuntimeError):  # of torch 2.15, which refuses them
        F.scaled_dot_product_attention(X[:, None], X[:, None], X[:, None], torch.ones(7, 7).bool(), 0.0, True)


LEFT: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (lambda: F.scaled_dot_product_attention(X.double(), X.double(), X.double()), "float64"),
    "device": (lambda: F.scaled_dot_product_attention(*(X.to("meta"),) * 3), "meta"),
    "two masks": (two_masks, "is_causal"),
    "nested": (
        lambda: F.scaled_dot_product_attention(
            *(torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged).unsqueeze(1),) * 3
        ),
        "nested",
    ),
    "vmap": (lambda: torch.vmap(F.scaled_dot_product_attention)(X, X, X), "torch.func"),
    "a layer of float64": (
        lambda: nn.MultiheadAttention(12, 2).double()(*(X.double(),) * 3, need_weights=False),
        "float64",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("call", "why"), LEFT.values(), ids=LEFT.keys())
def test_what_stays_with_torch_is_counted_once_with_its_reason(call: Callable[[], object], why: str) -> None:
    with rg.patch(report=None) as patch:
        call()
    assert patch.calls.total() == 1
    assert f"left to torch: {next(reason or '' for _, reason in patch.calls)}" in str(patch) and why in str(patch)
    assert "0 of 1 attention calls" in str(patch)


def test_the_summary_is_printed_once_or_given_to_whom_one_likes(capsys: pytest.CaptureFixture[str]) -> None:
    model, told = Plain(), list[str]()
    with rg.patch(model) as patch:
        model(X)
    assert capsys.readouterr().out == f"{patch}\n"
    assert str(patch) == (
        "regard.patch: 1 of 1 attention calls of Plain ran on regard\n       1  scaled_dot_product_attention  on regard"
    )
    with rg.patch(report=told.append):
        nn.Linear(12, 12)(X)
    with rg.patch(report=None):
        model(X)
    assert capsys.readouterr().out == "" and len(told) == 1 and "no attention call was seen" in told[0]


@pytest.mark.full
@pytest.mark.parametrize("build", [Plain, encoder])
def test_compiled(build: Callable[[], nn.Module]) -> None:
    """The graphs hold regard's kernels inside, torch's functions after it."""
    model, nodes = build(), list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled, expected = torch.compile(model, backend=backend, fullgraph=True), model(X)
    name = SDPA if build is Plain else MHA
    for given in (None, compiled):
        torch._dynamo.reset()
        nodes.clear()
        with rg.patch(given, report=None) as patch:
            for _ in range(2):
                torch.testing.assert_close(compiled(X), expected, atol=1e-5, rtol=1e-4)
        assert dict(patch.traced) == {(name, None): 1 if build is Plain else 2} and not patch.calls
        assert any("regard" in node for node in nodes)
        nodes.clear()
        torch.testing.assert_close(compiled(X), expected)
        assert nodes and not any("regard" in node for node in nodes)
        assert "in graphs" in str(patch)


def test_other_threads_are_patched_too() -> None:
    with rg.patch(report=None) as patch:
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(X, X, X))
        thread.start()
        thread.join()
    assert dict(patch.calls) == {(SDPA, None): 1}


def test_it_is_recorded() -> None:
    model = encoder().eval()
    with rg.record(model, (rg.facts.Entropy(),)) as plain:
        model(X)
    with rg.patch(report=None), rg.record(model, (rg.facts.Entropy(),)) as tape:
        model(X)
    assert tape.names == plain.names
    for name in tape.names:
        torch.testing.assert_close(tape[name][0][rg.facts.Entropy()], plain[name][0][rg.facts.Entropy()])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("appended", [False, True])
def test_a_record_is_that_of_torchs_own_run(appended: bool, batch_first: bool) -> None:
    """Padding queries have no weights, and what is appended stands behind the sequence, on either function."""
    layer = nn.MultiheadAttention(8, 2, batch_first=batch_first, add_zero_attn=appended, add_bias_kv=appended).train()
    x = torch.randn(2, 5, 8)
    x = x if batch_first else x.transpose(0, 1)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    facts = (rg.facts.Entropy(), rg.facts.Received(), rg.facts.Visible(), rg.facts.Distance())

    def recorded() -> FactResults:
        with rg.record(layer, facts) as tape:
            layer(x, x, x, key_padding_mask=hidden)
        return tape.calls[0].seen

    theirs = recorded()
    with rg.patch(report=None) as patched:
        ours = recorded()
    assert patched.calls == {("multi_head_attention_forward", None): 1}
    for fact in facts:
        torch.testing.assert_close(ours[fact], theirs[fact])
    assert ours[rg.facts.Visible()][1, :, 3:].eq(0).all()


def test_no_other_name_is_made_up() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'patches'"):
        _ = rg.patches  # type: ignore[attr-defined]
