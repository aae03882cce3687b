"""The instructions of programs, by name: native/steps/program.h computes them."""

from __future__ import annotations

OPERATIONS = (
    *("NUMBER", "LOAD", "GATHER", "RESULT", "LOAD_GRADIENT", "GATHER_GRADIENT", "DERIVATIVE", "WHERE"),
    *("ADD", "SUB", "MUL", "DIV", "MUL_NONZERO", "DIV_NONZERO", "MIN", "MAX", "POW", "REMAINDER"),
    *("NEG", "ABS", "ABS_SUB", "SIGN", "FLOOR", "CEIL", "SQRT", "EXP", "EXP2", "LOG", "TANH", "SIGMOID"),
    *("LOG1P", "EXPM1", "ERF", "SIN", "COS"),
    *("LT", "LE", "EQ"),
    *("INT_ADD", "INT_SUB", "INT_MUL", "INT_MIN", "INT_MAX", "INT_DIV", "INT_ABS", "INT_LT", "INT_LE", "INT_EQ"),
    *("AND", "OR", "XOR", "NOT", "INT_TO_FLOAT", "BOOL_TO_FLOAT", "BOOL_TO_INT"),
)
SLOTS = 48  # numbers of a pair that a program can hold at once
PROGRAM_OPERANDS = 12  # tensors that it can read
