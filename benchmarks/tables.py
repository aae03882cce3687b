"""What is measured: the cases of each table, in groups. candidates/ says how each peer makes the calls."""

from __future__ import annotations

from benchmarks.cases import DECODERS, STEPS, Case

SHAPES = ((8, 12, 128, 64), (1, 12, 512, 64), (1, 12, 2048, 64), (1, 8, 4096, 128))
FLOAT32, HALF, SHAPED, DECODE, RAGGED = (
    "float32",
    "bfloat16, float16",
    "masks, biases, dropout, shapes",
    "decoding, 8192 keys",
    "ragged batches, small calls",
)
# Two batches of sentences of 10 to 500 tokens, many of them short or many of them long: the time must follow the sum
# of the squares.
SENTENCES = tuple(10 + (n * n * 490) // 961 for n in range(32))
LONG_SENTENCES = tuple(500 - (n * n * 490) // 961 for n in range(32))
PADDED = (512, 100, 300, 480, 33, 256, 199, 421)
LONG = (1, 12, 8192, 64)
PLAIN = SHAPES[2]

INFERENCE = (
    *(
        Case(FLOAT32 if dtype == "float32" else HALF, f"{dtype} {what}", shape, dtype, what)
        for dtype in ("float32", "bfloat16", "float16")
        for what in ("full", "causal")
        for shape in SHAPES
    ),
    Case(SHAPED, "bool mask n × n", PLAIN, what="bool"),
    Case(SHAPED, "float bias n × n", PLAIN, what="bias"),
    Case(SHAPED, "dropout 0.1", PLAIN, what="dropout"),
    Case(SHAPED, "dv = 128, dk = 64", PLAIN, dv=128),
    Case(SHAPED, "three axes", (12, 2048, 64)),
    Case(SHAPED, "five axes", (2, 2, 6, 1024, 64)),
    Case(SHAPED, "padding mask (b, 1, 1, n)", (8, 12, 512, 64), what="padding", lengths=PADDED),
    Case(SHAPED, "window of 256", LONG, what="window"),
    Case(SHAPED, "full, beside the window", LONG, only=("regard", "torch")),
    *(
        Case(DECODE, f"decode {dtype} {heads}:{key_heads}", (1, heads, nq, 128), dtype, "full", key_heads, 8192)
        for dtype in ("float32", "bfloat16")
        for heads, key_heads in ((32, 32), (32, 8))
        for nq in (1, 4, 15)
    ),
    *(
        Case(RAGGED, f"32 sentences, {kind} (packed)", (1, 12, sum(lengths), 64), what="ragged", lengths=lengths)
        for kind, lengths in (("more short", SENTENCES), ("more long", LONG_SENTENCES))
    ),
    Case(RAGGED, "small call", (1, 4, 16, 32)),
    Case(RAGGED, "small call, causal", (1, 4, 16, 32), what="causal"),
)

ADDITIVE, LEARNED = "additive score", "learned biases, dropout, dv ≠ dk, small calls"
TRAINING = (
    *(
        Case(dtype, f"{dtype} {what}, {passes}", shape, dtype, what, passes=passes)
        for dtype in ("float32", "bfloat16")
        for what in ("full", "causal")
        for passes in ("backward", "both")
        for shape in SHAPES
    ),
    Case(LEARNED, "learned bias n × n, both", (1, 12, 1024, 64), what="bias", passes="both"),
    Case(LEARNED, "T5 bias, both", (1, 12, 1024, 64), what="t5", passes="both"),
    Case(LEARNED, "dropout 0.1, both", (1, 12, 1024, 64), what="dropout", passes="both"),
    Case(LEARNED, "dv = 128, dk = 64, both", (1, 12, 1024, 64), dv=128, passes="both"),
    Case(LEARNED, "small call, both", (1, 4, 16, 32), passes="both"),
    *(
        Case(ADDITIVE, f"hidden {hidden}, {passes}", (1, 1, n, hidden), what="additive", dv=64, passes=passes)
        for passes in ("forward", "both")
        for n in (1024, 2048)
        for hidden in (64, 128)
        if passes == "forward" or n == 1024
    ),
    Case(ADDITIVE, "hidden 64, both", (1, 1, 16384, 64), what="additive", dv=64, passes="both", only=("regard",)),
    *(
        Case(
            ADDITIVE,
            f"decoder's step, {nk} keys, {passes}",
            (32, 1, 1, 128),
            what="additive",
            nk=nk,
            dv=128,
            passes=passes,
        )
        for passes in ("forward", "both")
        for nk in (50, 1000)
    ),
)

STEP, BATCHES, WHOLE = "a decoding step, growing cache", "windows, padding, pages, prefixes, documents", "whole models"
PROMPTS = (1024, 200, 600, 960, 66, 512, 398, 842)
SERVED = (1024, 800, 1100, 1000, 950, 1013, 870, 1200, 990, 1040, 760, 1090, 930, 1001, 1150, 1082)
OURS, BOTH = ("regard", "contiguous"), ("regard", "torch")
GENERATION = (
    *(
        Case(
            STEP,
            f"step {dtype} {heads}:{key_heads}, {keys} keys",
            (1, heads, STEPS, d),
            *(dtype, "growing", key_heads, keys + STEPS),
            only=BOTH,
        )
        for dtype in ("float32", "bfloat16")
        for heads, key_heads in ((8, 8), (32, 8))
        for d in (64, 128)
        for keys in (128, 1024, 8192)
    ),
    *(
        Case(
            BATCHES,
            f"step, int8, {heads}:8, {keys} keys",
            (1, heads, STEPS, d),
            *("bfloat16", "int8", 8, keys + STEPS),
            only=BOTH,
        )
        for heads, d in ((8, 64), (32, 128))
        for keys in (1024, 8192)
    ),
    Case(BATCHES, "step, window of 512", (1, 8, STEPS, 64), what="sliding", nk=8192 + STEPS, size=512, only=BOTH),
    Case(
        BATCHES,
        "step, left-padded prompts",
        (8, 8, STEPS, 64),
        what="left",
        nk=1024 + STEPS,
        lengths=PROMPTS,
        only=BOTH,
    ),
    *(
        Case(
            BATCHES,
            f"step, pages of {size}",
            (1, 8, STEPS, 64),
            what="pages",
            nk=1024 + STEPS,
            size=size,
            only=OURS,
        )
        for size in (16, 128)
    ),
    Case(BATCHES, "step, shared prefix of 2048", (16, 8, STEPS, 64), what="prefix", nk=2112 + STEPS, size=2048),
    *(
        Case(
            BATCHES,
            f"2 prompts of 256 and 14 tokens, {dtype} {heads}:8",
            (1, heads, 2 * 256 + 14, d),
            *(dtype, "mixed", 8, sum(SERVED)),
            lengths=SERVED,
            size=256,
        )
        for dtype, heads, d in (("float32", 8, 64), ("bfloat16", 8, 64), ("float32", 32, 128))
    ),
    Case(BATCHES, "unsorted documents", (1, 1, 32768, 64), what="unsorted", size=512, only=BOTH),
    *(
        Case(WHOLE, f"Llama generates, {dtype}, {cache} cache", (batch, 1024), dtype, cache, size=128, only=BOTH)
        for dtype in ("float32", "bfloat16")
        for cache in ("dynamic", "static")
        for batch in (1, 8)
    ),
    Case(WHOLE, "MiniLM, sentences, sorted by length", (500, 200), what="sentences", only=BOTH),
    Case(WHOLE, "MiniLM, sentences, 32 as they come", (500, 200), what="sentences", size=32, only=BOTH),
)
LAYERS, IMAGES = "torch's layers", "models of images"
BATCH, LONGER, WIDER = (8, 512, 256), (2, 2048, 256), (8, 512, 512)
SHORT = ((8, 128, 512), (64, 16, 512), (1, 128, 512))
MODES = (("eval", "forward"), ("training", "both"))
PATCHING = (
    *(
        Case(LAYERS, f"Transformer{what.capitalize()}, {mode}", shape, what=what, passes=passes)
        for what in ("encoder", "decoder")
        for shape in (BATCH, LONGER, WIDER)
        for mode, passes in MODES
    ),
    *(
        Case(LAYERS, f"TransformerEncoder, short, {mode}", shape, what="encoder", passes=passes)
        for shape in SHORT
        for mode, passes in MODES
    ),
    *(
        Case(LAYERS, f"TransformerEncoder, padding, {mode}", shape, what="padded", lengths=lengths, passes=passes)
        for shape, lengths in ((BATCH, PADDED), (LONGER, (2048, 900)))
        for mode, passes in MODES
    ),
    *(
        Case(LAYERS, "TransformerEncoder, dropout 0.1, training", shape, what="encoder", passes="both", dropout=0.1)
        for shape in (BATCH, LONGER)
    ),
    *(
        Case(IMAGES, f"{model}, {mode}", shape, what=what, passes=passes)
        for model, what, shape in (
            ("ViT-S of timm, 224 x 224", "vit", (8, 3, 224, 224)),
            ("ViT-S of timm, 384 x 384", "vit", (4, 3, 384, 384)),
            ("Swin-T of timm, fused", "swin", (4, 3, 224, 224)),
            ("ViT of torchvision", "torchvision", (8, 3, 224, 224)),
            ("UNet of diffusers", "unet", (2, 4, 64, 64)),
            ("DiT of diffusers", "dit", (4, 4, 64, 64)),
        )
        for mode, passes in MODES
    ),
)
SCORED, SEEN, BOTH_PASSES, SUMMED = "score_mods", "mask_mods", "score_mods, both passes", "sums over features"
FUNCTIONS = (
    Case("the plain call", "full", PLAIN),
    *(Case(SCORED, name, PLAIN, what=name) for name in ("alibi", "two operations", "ten operations", "gates")),
    *(
        Case(SEEN, name, PLAIN, what=name)
        for name in ("neighbours", "dilated", "wider by head", "ten operations, neighbours")
    ),
    Case("the plain call", "full, both", PLAIN, passes="both"),
    *(
        Case(BOTH_PASSES, f"{name}, both", PLAIN, what=name, passes="both")
        for name in ("two operations", "ten operations", "learned table")
    ),
    *(
        Case(SUMMED, name if passes == "forward" else f"{name}, both", (1, 12, 1024, 64), what=name, passes=passes)
        for passes in ("forward", "both")
        for name in ("L1 distance", "L1 distance, ten operations")
    ),
)
READ, STEPS_OF_GENERATE, TRAINED = "a forward", "a step of generate", "a training step"
READING = {  # by architecture: what a forward reads
    **dict.fromkeys(DECODERS, (1, 2048)),
    "BERT": (8, 512),
    "ModernBERT": (2, 2048),
    "T5": (4, 512),
    "Whisper": (1, 80, 3000),
    "ViT": (8, 3, 224, 224),
}
BEFORE = {**dict.fromkeys(DECODERS, (1, 1024)), "T5": (1, 1024), "Whisper": (1, 80, 3000)}  # what stands before a step
LANGUAGE = tuple(
    case
    for dtype in ("float32", "bfloat16")
    for case in (
        *(Case(READ, f"{name}, {dtype}, forward", shape, dtype, name) for name, shape in READING.items()),
        *(
            Case(STEPS_OF_GENERATE, f"{name}, {dtype}, step", shape, dtype, name, size=STEPS)
            for name, shape in BEFORE.items()
        ),
        *(
            Case(TRAINED, f"{name}, {dtype}, training", shape, dtype, name, passes="both")
            for name, shape in READING.items()
        ),
    )
)
TABLES = {
    "inference": INFERENCE,
    "training": TRAINING,
    "generation": GENERATION,
    "models": LANGUAGE,
    "patching": PATCHING,
    "functions": FUNCTIONS,
}
