"""Random calls of regard against an oracle in float64 that is written from the documentation alone.

    python -m tests.fuzz --minutes 10        from the root of the repository: prints the seed of each finding
    python -m tests.fuzz --seed 4711         prints one call in words and checks it again

call    one call as plain data: tensors and named parts, nothing of regard
oracle  what the documentation says about such a call (with roundings): dense, float64, nothing of regard
reach   what a NaN or inf in q, k or v may reach: nothing of regard
draw    the random call of a seed (with tensors, scores and masks)
build   the call as regard's own values
surroundings  what is around a call (default dtype, modes, earlier calls, threads, classes of tensors; with variations
        and subclasses); each call is made in some of it too, and must answer the same
check   runs regard and compares
"""
