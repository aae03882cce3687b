"""One query over keys and values in a file larger than memory, beside the speed at which the disk alone is read.

    python -m benchmarks.streaming --folder DIR --gigabytes 8

writes a file of float32 keys and values, (1, 8, n, 128) each, into DIR, and deletes it afterwards. In turns, with cold
caches (posix_fadvise): the file alone, by read() in pieces of 8 MB with O_DIRECT, by read() through the cache, and by
copies out of a mapping; then attention_over, in a process of its own, whose peak of memory is VmHWM. The answer over
the first part of the file is compared with attention over the same keys in memory. Linux alone.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HEADS, WIDTH = 8, 128
ROW = HEADS * WIDTH * 4  # bytes of one key, or of one value
PIECE = 8 << 20

STREAM = """
import json, sys, time
import torch, regard as rg

file, kind, keys, ahead = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if kind == "safetensors":
    source = rg.sources.Safetensors(file)
else:
    import numpy as np
    n = np.memmap(file, np.float32, "r").size // 2 // 1024
    k, v = np.memmap(file, np.float32, "r", shape=(2, 1, 8, n, 128))
    source = rg.sources.Arrays(k, v)
torch.manual_seed(0)
q = torch.randn(1, 8, 1, 128)

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

few = next(iter(source.parts())).read()
k, v = (torch.as_tensor(t)[..., :keys, :] for t in few)
part, exact = rg.attention_over(q, [(k, v)] * 2), rg.attention(q, torch.cat([k, k], -2), torch.cat([v, v], -2))
off = float((part - exact).abs().max() / exact.abs().max())
del few, k, v
start, cpu = time.perf_counter(), time.process_time()
out = rg.attention_over(q, source, ahead=ahead)
print(json.dumps({
    "seconds": time.perf_counter() - start, "processor": time.process_time() - cpu, "peak": peak(), "off": off,
    "finite": bool(out.isfinite().all()),
}))
"""


def write(file: Path, n: int, kind: str) -> None:
    """n keys and n values, normal numbers that repeat every 4 MB."""
    shape, half = [1, HEADS, n, WIDTH], n * ROW
    names = {"k": [0, half], "v": [half, 2 * half]}
    header = json.dumps({x: {"dtype": "F32", "shape": shape, "data_offsets": at} for x, at in names.items()}).encode()
    header += b" " * (-(len(header) + 8) % 4096)
    block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32).tobytes()
    with open(file, "wb") as out:
        if kind == "safetensors":
            out.write(len(header).to_bytes(8, "little") + header)
        left = 2 * half
        while left:
            left -= out.write(block[:left])


def forget(file: Path) -> None:
    """Nothing of the file is in the cache afterwards."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_alone(file: Path, flags: int) -> None:
    descriptor, buffer, at = os.open(file, os.O_RDONLY | flags), mmap.mmap(-1, PIECE), 0
    while got := os.preadv(descriptor, [buffer], at):
        at += got
    os.close(descriptor)


def map_alone(file: Path) -> None:
    mapped, buffer = np.memmap(file, np.uint8, "r"), np.empty(PIECE, np.uint8)
    for at in range(0, mapped.size, PIECE):
        piece = mapped[at : at + PIECE]
        buffer[: piece.size] = piece
        mapped._mmap.madvise(mmap.MADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the file is written, and deleted")
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--kind", choices=["safetensors", "mapped"], default="safetensors")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ahead", type=int, default=2)
    given = parser.parse_args()
    file = given.folder / f"regard-streaming.{given.kind}"
    n = int(given.gigabytes * 1e9) // (2 * ROW)
    ways = {
        "disk, O_DIRECT": lambda: read_alone(file, os.O_DIRECT),
        "disk, read()": lambda: read_alone(file, 0),
        "disk, mapped": lambda: map_alone(file),
    }
    try:
        write(file, n, given.kind)
        size = file.stat().st_size
        print(f"{size / 1e9:.2f} GB, {n:,} keys of {HEADS} heads of {WIDTH}, float32, {given.kind}")
        for turn in range(given.rounds):
            for name, run in ways.items():
                forget(file)
                start = time.perf_counter()
                run()
                print(f"round {turn}  {name:16} {size / 1e9 / (time.perf_counter() - start):6.2f} GB/s", flush=True)
            forget(file)
            command = [sys.executable, "-c", STREAM, str(file), given.kind, "4000", str(given.ahead)]
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            if told["off"] > 2e-6 or not told["finite"]:
                raise SystemExit(f"attention_over is wrong: {told}")
            print(
                f"round {turn}  attention_over   {size / 1e9 / told['seconds']:6.2f} GB/s, "
                f"{told['seconds']:.2f} s, processor {told['processor']:.2f} s, peak {told['peak'] / 1e6:.0f} MB, "
                f"off by {told['off']:.1e}",
                flush=True,
            )
    finally:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
