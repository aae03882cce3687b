"""native/python/python_api.h, which declares what is called of Python, says what Python's own headers say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HEADER = (Path(__file__).resolve().parents[2] / "native/python/python_api.h").read_text(encoding="utf-8")
INCLUDE = Path(sysconfig.get_path("include"))
FIELDS = {"name": "ml_name", "function": "ml_meth", "flags": "ml_flags", "doc": "ml_doc"}

pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(not (INCLUDE / "Python.h").exists(), reason="needs Python's own headers"),
    pytest.mark.skipif(
        bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="without the lock Python's headers have no stable ABI"
    ),
]


def checks(header: str) -> list[str]:
    """Static assertions that the declarations of a header are those of Python's stable ABI, in Python's own types."""
    text = re.sub(r" *//.*", "", header)
    functions = re.findall(r"^([\w ]+\**)\s*\b(Py\w+)\((.*)\);$", text, re.MULTILINE)
    objects = re.findall(r"^extern (\w+) (\w+);$", text, re.MULTILINE)
    numbers = re.findall(r"^constexpr int (METH_\w+) = (\w+);$", text, re.MULTILINE)
    named = re.findall(r"^\w.*?\bPy\w+\(", text, re.MULTILINE)
    assert len(functions) == len(named) > 20 and objects and numbers, "what is declared is read wrongly"
    fields = re.search(r"struct PyMethodDef (\{.*?\n\});", text, re.DOTALL)
    assert fields is not None
    return [
        f"struct Fields {fields.group(1)};",
        "static_assert(std::is_same_v<Py_ssize_t, intptr_t>);",
        "static_assert(sizeof(Fields) == sizeof(PyMethodDef));",
        *(f"static_assert(offsetof(Fields, {a}) == offsetof(PyMethodDef, {b}));" for a, b in FIELDS.items()),
        *(
            f"static_assert(std::is_same_v<decltype(Fields::{a}), decltype(PyMethodDef::{b})>);"
            for a, b in FIELDS.items()
            if a != "function"  # METH_FASTCALL's own type, which Python casts
        ),
        *(f"static_assert(std::is_same_v<decltype(::{name}), {kind}>);" for kind, name in objects),
        *(f"static_assert({name} == {value});" for name, value in numbers),
        *(f'static_assert(std::is_same_v<decltype(::{f}), {kind}({given})>, "{f}");' for kind, f, given in functions),
    ]


def compiled(lines: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    source = folder / "checks.cpp"
    first = ("#define Py_LIMITED_API 0x030a0000", *(f"#include <{name}>" for name in ("Python.h", "stddef.h")))
    source.write_text("\n".join((*first, "#include <stdint.h>", "#include <type_traits>", *lines)))
    command = ["c++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{INCLUDE}", source]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_declarations_are_those_of_the_stable_abi(tmp_path: Path) -> None:
    ran = compiled(checks(HEADER), tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("long long PyLong_AsLongLong(PyObject*)", "long PyLong_AsLongLong(PyObject*)"),
        ("PyObject* PyTuple_New(Py_ssize_t)", "PyObject* PyTuple_New(int)"),
        ("int PyObject_IsTrue(PyObject*)", "int PyObject_IsTruth(PyObject*)"),
        ("int PyObject_IsTrue(PyObject*)", "Py_ssize_t PyUnicode_GET_LENGTH(PyObject*)"),
        ("METH_FASTCALL = 0x80", "METH_FASTCALL = 0x40"),
        ("  int flags;\n", "  short flags;\n"),
    ],
)
def test_a_wrong_declaration_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    assert right in HEADER
    assert compiled(checks(HEADER.replace(right, wrong)), tmp_path).returncode != 0
