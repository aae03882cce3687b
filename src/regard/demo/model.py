"""ByteTransformer: a small causal language model over bytes, built from regard.nn; and the trained one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.resources import as_file, files

from torch import Tensor, nn

from regard.masks.positional import Causal, Window
from regard.nn.multihead import MultiHeadAttention
from regard.nn.rotary import Rotary

BYTES = 256
# A byte sees itself and the 255 before it. So no distance is strange to the model, and a text may be of any length.
REACH = 255
SEEN = Causal() & Window(before=REACH, after=0)


@dataclass(frozen=True)
class Shape:
    """The sizes of a ByteTransformer."""

    width: int = 128
    layers: int = 4
    heads: int = 4


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = MultiHeadAttention(width, shape.heads, bias=False, rotary=Rotary(width // shape.heads))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask=SEEN)
        return x + self.mlp(self.mlp_norm(x))


def character(byte: int) -> str:
    """A byte as text: its character, where it is one of ASCII.

    >>> character(65), character(200)
    ('A', '\\\\xc8')
    """
    return chr(byte) if byte < 128 else f"\\x{byte:02x}"


class ByteTokenizer:
    """The tokenizer of a ByteTransformer, with the methods that those of transformers have: a text is its UTF-8 bytes.

    >>> ByteTokenizer()("né"), ByteTokenizer().decode([110, 195, 169])
    ({'input_ids': [110, 195, 169]}, 'né')
    """

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """There are no special ones."""
        return {"input_ids": list(text.encode())}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [character(one) for one in ids]

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


class ByteTransformer(nn.Module):
    """Logits of the next byte: tokens (batch, n) of 0..255 -> (batch, n, 256).

    Pre-norm blocks, rotary positions, attention to the last 256 bytes, the embedding shared with the output.

    >>> ByteTransformer(Shape(width=32, layers=1, heads=2))(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 256])
    """

    tokenizer = ByteTokenizer()  # rg.look(model, text) asks the model for it

    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


def save(model: ByteTransformer, path: str) -> None:
    """Writes the weights as float16 safetensors, with the model's sizes as metadata."""
    from safetensors.torch import save_file

    metadata = {name: str(size) for name, size in asdict(model.shape).items()}
    save_file({name: t.half().contiguous() for name, t in model.state_dict().items()}, path, metadata)


def load() -> ByteTransformer:
    """The shipped model, in float32 and eval mode. See CARD.md beside it for its data, loss and licence."""
    from safetensors import safe_open

    with (
        as_file(files("regard.demo") / "weights.safetensors") as path,
        safe_open(str(path), framework="pt") as weights,  # pyright: ignore[reportUnknownVariableType]
    ):
        sizes: dict[str, str] = weights.metadata()
        model = ByteTransformer(Shape(**{name: int(size) for name, size in sizes.items()}))
        model.load_state_dict({name: weights.get_tensor(name).float() for name in weights.keys()})  # noqa: SIM118
    return model.eval()
