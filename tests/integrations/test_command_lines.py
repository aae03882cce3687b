"""Command lines that people write, and what `regard` answers: a table to read.

Each line is a command line, its exit status, and a part of what is printed: on standard output where the status is 0,
on standard error where it is 1 (it could not be done) or 2 (there is no such command, option or value). `< file` is
standard input. m is a small model of transformers, few is one with 20 positions.
"""

from __future__ import annotations

import io
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from regard.compat.folder import MINILM
from regard_command import main

HELP = """
regard  # 0  usage: regard [-h] [--version] COMMAND ...
regard --help  # 0  show which heads differ between two texts or two models
regard -h  # 0  More: regard COMMAND --help
regard --version  # 0  regard 0.1.0
regard -V  # 2  regard has no option -V; write regard --version.
regard version  # 2  regard has no command version; write regard --version.
regard help  # 2  regard has no command help; write regard --help, or regard look --help.
regard look --help  # 0  usage: regard look [-h] [--text FILE] [-t WORDS]
regard compare -h  # 0  usage: regard compare
regard bench --help  # 0  usage: regard bench [-h] [--seconds SECONDS]
regard doctor --help  # 0  usage: regard doctor [-h] [MODEL]
regard demo --help  # 0  usage: regard demo
regard Look one.txt  # 2  regard has no command Look; did you mean look?
regard lok one.txt  # 2  regard has no command lok; did you mean look?
regard show one.txt  # 2  regard has no command show; write regard look FILE -o report.html.
regard diff one.txt two.txt  # 2  regard has no command diff; write regard compare FILE OTHER.
regard benchmark  # 2  regard has no command benchmark; did you mean bench?
regard one.txt  # 2  regard has no command one.txt; write regard look one.txt.
regard one.txt -o a.html  # 2  regard has no command one.txt; write regard look one.txt.
regard missing.txt  # 2  regard has no command missing.txt; write regard look missing.txt.
regard ./two.txt  # 2  regard has no command ./two.txt; write regard look ./two.txt.
regard one.txt two.txt  # 2  regard has no command one.txt; write regard compare one.txt two.txt.
regard "the cat sat"  # 2  regard has no command 'the cat sat'; write regard look -t 'the cat sat'.
regard - < one.txt  # 2  regard has no command -; write regard look -.
regard folder  # 2  regard has no command folder; it has demo, look, compare, bench, doctor.
regard m  # 2  regard has no command m; write regard look FILE --model m.
regard look --  # 1  there is no text; name a FILE
"""

DEMO = """
regard demo -o out.json  # 0  wrote out.json  (L3H1: induction head,
regard demo --head L3H1 -o out.json  # 0  wrote out.json  (L3H1: blocks.3.attention)
regard demo --head L9H9  # 1  there is no layer L9 here; there are L0 to L3.
regard demo --head 3  # 2  '3' is no head; expected a label such as L3H1 (layer 3, head 1), decoder L3H1, or 3,1.
regard demo -t hello  # 2  regard demo has no option -t; regard look has it.
regard demo other.txt  # 2  demo does not take 'other.txt'; it reads its own text; regard look other.txt reads another.
regard demo -o out.docx  # 1  out.docx is not supported as a report's file: its suffix is none of .png .svg .pdf .html
"""

TEXTS = """
regard look  # 1  there is no text; name a FILE, write -t 'some words', or --probe for random tokens.
regard look one.txt  # 0  byte model (ByteTransformer)  56 bytes, 4 × 4 heads
regard look ./one.txt  # 0  56 bytes
regard look - < one.txt  # 0  56 bytes
regard look --text one.txt  # 0  56 bytes
regard look --text=one.txt  # 0  56 bytes
regard look --text - < empty.txt  # 1  standard input holds 0 bytes; expected 2 to 65,536.
regard look -t "the cat sat on the cat"  # 0  22 bytes
regard look -t "日本語 naïve 🙂"  # 0  21 bytes
regard look -t "    "  # 0  4 bytes
regard look -t ""  # 1  the text holds 0 bytes; expected 2 to 65,536.
regard look -t a  # 1  the text holds 1 byte; expected 2 to 65,536.
regard look -t hello world  # 2  regard look reads one text; 2 are given, 'hello', 'world': quote words: -t 'hello world'.
regard look the cat sat  # 2  regard look reads one text; 3 are given, 'the', 'cat', 'sat': quote words: -t 'the cat sat'.
regard look "the cat sat"  # 1  No such file or directory; for the words themselves write -t 'the cat sat'.
regard look one.txt two.txt  # 2  regard look reads one text; 2 are given, 'one.txt', 'two.txt': regard compare one.txt two.txt compares two.
regard look one.txt --text two.txt  # 2  regard compare two.txt one.txt compares two.
regard look one.txt -t words  # 2  regard look reads one text; 2 are given, 'words', 'one.txt': leave one of them out.
regard look missing.txt  # 1  missing.txt: No such file or directory; for the words themselves write -t 'missing.txt'.
regard look https://example.org/a.txt  # 1  regard fetches nothing: curl -s https://example.org/a.txt | regard look -.
regard look empty.txt  # 1  empty.txt holds 0 bytes; expected 2 to 65,536.
regard look binary.bin  # 1  binary.bin is no text: it has a NUL byte at offset 7.
regard look latin.txt  # 1  latin.txt is not UTF-8: byte 0xe9 at offset 3 (line 1, after 'caf'). If it is a text, name its encoding, as in --encoding latin-1.
regard look latin.txt --encoding latin-1  # 0  12 bytes
regard look latin.txt --encoding latin1  # 0  12 bytes
regard look latin.txt --encoding klingon  # 2  'klingon' is no encoding of texts; expected one such as utf-8, latin-1, utf-16.
regard look one.txt --encoding  # 2  regard look: error: --encoding has no value; expected the name of an encoding, as in --encoding latin-1.
regard look -t  # 2  regard look: error: -t has no value; expected a text in quotes, as in -t 'some words'.
regard look --text  # 2  --text has no value; expected a file, as in --text notes.txt.
regard look --text --probe  # 2  --text has no value; expected a file, as in --text notes.txt.
regard look long.txt  # 1  long.txt holds 70,000 bytes; expected 2 to 65,536: the byte model takes a step a byte, and time grows with the square. Look at a part of it: head -c 65536 long.txt | regard look -.
"""  # noqa: E501

FILES = """
regard look one.txt -o a.json  # 0  wrote a.json  (L3H1: induction head
regard look one.txt --output=a.json  # 0  wrote a.json
regard look one.txt -o a.html  # 0  wrote a.html
regard look one.txt -o a.HTML  # 0  wrote a.HTML
regard look one.txt -o a.npz  # 0  wrote a.npz
regard look one.txt -o a.png  # 0  wrote a.png
regard look one.txt -o a.svg  # 0  wrote a.svg
regard look one.txt -o a.pdf  # 0  wrote a.pdf
regard look one.txt -o a.htm  # 1  a.htm is not supported as a report's file: its suffix is none of .png .svg .pdf .html .json .npz.
regard look one.txt -o a.jpg  # 1  a.jpg is not supported as a report's file
regard look one.txt -o a  # 1  a is not supported as a report's file
regard look one.txt -o folder/  # 1  folder is not supported as a report's file
regard look one.txt -o one.txt  # 1  one.txt is not supported as a report's file
regard look one.txt -o none/a.html  # 1  none/a.html: there is no folder none; make it first, or name another with -o.
regard look one.txt -o  # 2  regard look: error: -o has no value; expected a file for the report, as in -o report.html.
regard look one.txt --output --open  # 2  --output has no value; expected a file for the report, as in --output report.html.
regard look -o one.txt -o  # 2  -o has no value; expected a file for the report, as in -o report.html.
regard compare one.txt two.txt -o  # 2  regard compare: error: -o has no value; expected a file for the report, as in -o report.html.
regard look one.txt --html  # 2  regard look has no option --html; the suffix of -o says it: -o report.html.
regard look one.txt --save a.html  # 2  regard look has no option --save; write -o report.html.
regard look one.txt --format json  # 2  regard look has no option --format; the suffix of -o says it
"""  # noqa: E501

HEADS = """
regard look one.txt --head L0H3 -o a.json  # 0  wrote a.json  (L0H3: blocks.0.attention)
regard look one.txt --head l0h3 -o a.json  # 0  wrote a.json  (L0H3: blocks.0.attention)
regard look one.txt --head 0,3 -o a.json  # 0  wrote a.json  (L0H3: blocks.0.attention)
regard look one.txt --head L4H0  # 1  there is no layer L4 here; there are L0 to L3.
regard look one.txt --head 0.1  # 2  '0.1' is no head; expected a label such as L3H1 (layer 3, head 1), decoder L3H1, or 3,1.
regard look one.txt --head "decoder L0H1"  # 1  there is no layer decoder L0 here; there are L0 to L3.
regard look one.txt --layer 3  # 2  regard look has no option --layer; name the layer and the head: --head L3H1.
regard look one.txt --head  # 2  --head has no value; expected the label of a head, as in --head L3H1.
regard look one.txt --contributions  # 0  part in the logit of
regard look one.txt --contributions e  # 0  part in the logit of ‘e’
regard look one.txt --contributions zz  # 1  --contributions 'zz': that is 2 tokens of the model; expected one.
regard look one.txt --carried  # 0  norm carried
regard look one.txt --circuits  # 0  copying, eigenvalues of OV
regard look one.txt --circuits -o a.html  # 0  wrote a.html  (L3H1: induction head,
regard look one.txt --circuits --carried -o a.json  # 0  wrote a.json
regard look one.txt --circuits=x  # 2  --circuits takes no value, and 'x' is given.
regard look one.txt --circuit  # 0  copying
regard look one.txt --ablate  # 0  loss without a head, more than
regard look one.txt --ablate=3  # 2  --ablate takes no value, and '3' is given.
regard look --probe  # 0  64 random tokens, twice
regard look one.txt --probe  # 0  induction heads on random tokens: L3H1
"""  # noqa: E501

MODELS = """
regard look one.txt --model m  # 0  m (GPT2Model)  13 tokens, 2 × 2 heads
regard look one.txt --model few  # 0  few (GPT2Model)  13 tokens, 2 × 2 heads
regard look one.txt --model few --probe  # 0  induction heads on random tokens
regard look one.txt --model ./m --head L0H1 -o m.html  # 0  wrote m.html  (L0H1: h.0.attn)
regard look one.txt --model m --contributions  # 0  part in the logit of
regard look one.txt --model minilm  # 0  minilm (BertModel)  15 tokens, 6 × 12 heads
regard look one.txt --model minilm --probe  # 1  BertModel is not causal
regard look one.txt --model bert-base-uncased  # 1  bert-base-uncased is no model of transformers: expected a folder with config.json and weights. regard downloads nothing: save the model, and name its folder.
regard look one.txt --model folder  # 1  folder is no model of transformers: expected a folder with config.json and weights.
regard look one.txt --model m --circuits  # 0  copying
regard look one.txt --model  # 2  regard look: error: --model has no value; expected a folder with a model of transformers, or minilm, as in --model minilm.
regard compare one.txt --with-model  # 2  --with-model has no value; expected a folder with a model of transformers, or minilm, as in --with-model minilm.
regard look one.txt --modle m  # 2  regard look has no option --modle; did you mean --model?
regard look one.txt --gpu  # 2  regard look has no option --gpu; models run where they are loaded, on the CPU.
regard look folder  # 1  folder: Is a directory; name a file, or a folder with a model as --model folder.
regard look one.txt -o a.png -o b.png  # 2  -o is given twice; expected once.
regard compare one.txt two.txt --head L3H1 --head L2H1  # 2  --head is given twice; the other head is --with-head.
regard compare one.txt --model m --model minilm  # 2  --model is given twice; the other model is --with-model.
regard doctor --model m  # 2  regard doctor has no option --model; write regard doctor DIR.
regard -o a.png look one.txt  # 2  regard has no option -o; write it behind the command look.
regard look one.txt --versoin  # 2  regard look has no option --versoin; did you mean regard --version?
regard look one.txt -m minilm  # 2  regard look has no option -m; write --model DIR.
regard look one.txt --device cuda  # 2  regard look has no option --device; models run where they are loaded, on the CPU.
regard look one.txt --tokens 5  # 2  regard look has no option --tokens; write head -c 4096 FILE | regard look -.
regard look one.txt --verbose  # 2  regard look has no option --verbose; it has --help, --text, --words,
regard look -f one.txt  # 2  regard look has no option -f; write FILE alone, or --text FILE.
"""  # noqa: E501

COMPARED = """
regard compare  # 1  there is no text; name a FILE, or two, or write -t 'some words'.
regard compare one.txt  # 1  there is one text, one model and no second head; name another text, --with-model DIR, or --head and --with-head.
regard compare one.txt two.txt  # 0  heads that changed most: L
regard compare one.txt - < two.txt  # 0  heads that changed most: L
regard compare - - < two.txt  # 1  both texts are standard input, which can be read once; name a file for one of them.
regard compare -t "the cat" -t "the dog"  # 0  before: byte model
regard compare one.txt two.txt three.txt  # 2  regard compare does not take 'three.txt'; it compares two texts.
regard compare one.txt two.txt -o c.html  # 0  wrote c.html
regard compare one.txt two.txt -o c.png  # 1  c.png is not supported as a comparison's file: its suffix is none of .html .json .npz.
regard compare one.txt two.txt --head L1H1 --with-head L2H2  # 0  L1H1 before, L2H2 after: 51% of the mass is on other keys
regard compare one.txt --with-head L1H1  # 1  --with-head is the head after; name the one before too, as in --head L3H1.
regard compare one.txt --model m --with-model minilm  # 1  regard compare: the reports have 2 layers of [2] heads and 6 layers of [12] heads; expected the same layers and heads.
regard compare one.txt --with-model nowhere  # 1  nowhere is no model of transformers
regard compare one.txt latin.txt  # 1  latin.txt is not UTF-8
regard compare one.txt empty.txt  # 1  empty.txt holds 0 bytes; expected 2 to 65,536.
regard compare one.txt two.txt --heads L1H1  # 2  regard compare has no option --heads; did you mean --head?
"""  # noqa: E501

MACHINE = """
regard doctor  # 0  kernels
regard doctor m  # 0  regard serves this model
regard doctor few  # 0  12 tokens, float32
regard doctor folder  # 1  folder is no model of transformers: expected a folder with config.json and weights.
regard doctor gpt2  # 1  regard downloads nothing: save the model, and name its folder.
regard doctor m other  # 2  regard doctor does not take 'other'; it examines one model.
regard bench --seconds -1  # 1  --seconds is -1; expected a number of seconds, 0 or more.
regard bench --seconds ten  # 2  argument --seconds: 'ten' is no number of seconds; expected one such as 30, 0 or more.
regard bench --seconds=  # 2  argument --seconds: '' is no number of seconds; expected one such as 30, 0 or more.
regard bench --seconds 1,5  # 2  argument --seconds: '1,5' is no number of seconds; expected one such as 30, 0 or more.
regard bench --seconds  # 2  --seconds has no value; expected a number of seconds, as in --seconds 30.
regard bench --seconds nan  # 1  --seconds is nan; expected a number of seconds, 0 or more.
regard bench 5  # 2  regard bench does not take '5'; write --seconds 5 for the time.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command lines name."""
    path = tmp_path_factory.mktemp("lines")
    (path / "one.txt").write_text("She sells sea shells by the shore. She sells sea shells.")
    (path / "two.txt").write_text("He sells old books by the shore. He sells old books.")
    (path / "empty.txt").write_bytes(b"")
    (path / "latin.txt").write_bytes("café naïve".encode("latin-1"))
    (path / "binary.bin").write_bytes(b"\x7fELF\x02\x01\x01\x00\x00")
    (path / "long.txt").write_bytes(b"a" * 70_000)
    (path / "folder").mkdir()
    if find_spec("transformers") is not None:
        _save_model(path / "m")
        _save_model(path / "few", positions=20)
    return path


def _save_model(path: Path, positions: int = 64) -> None:
    """A model with random weights, and a tokenizer that knows the words of one.txt."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = ["[UNK]", "She", "sells", "sea", "shells", "by", "the", "shore", "."]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(path)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": len(words), "n_positions": positions}
    GPT2LMHeadModel(GPT2Config(**sizes, **ends)).save_pretrained(path)


def lines(*tables: str) -> list[Any]:
    """A parameter for each line, `command  # status  a part of the answer`."""
    found = [line.split("  # ") for line in "".join(tables).splitlines() if line]
    return [pytest.param(line, int(said[0]), said[3:], id=line) for line, said in found]


@pytest.mark.parametrize(("line", "status", "said"), lines(HELP, DEMO, TEXTS, FILES, HEADS, MODELS, COMPARED, MACHINE))
def test_a_command_line_is_answered(
    line: str, status: int, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for word, module in (
        (" m", "transformers"),
        (" few", "transformers"),
        ("minilm", MINILM),
        (".png", "matplotlib"),
        (".svg", "matplotlib"),
    ):
        if word in line and status != 2 and find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    monkeypatch.chdir(folder)
    command, _, source = line.partition(" < ")
    given = (folder / source).read_bytes() if source else b""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    try:
        ended = main(shlex.split(command)[1:])
    except SystemExit as left:
        ended = left.code
    printed = capsys.readouterr()
    answer = printed.err if status else printed.out
    assert ended == status and " ".join(said.split()) in " ".join(answer.split()), answer
    if status:
        assert len([each for each in answer.splitlines() if each.startswith("regard")]) == 1  # one sentence
