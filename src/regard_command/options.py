"""Checks of a command line before argparse reads it: unknown commands and options, and options without a value."""

from __future__ import annotations

import os
from argparse import Action, ArgumentParser, Namespace, _AppendAction  # pyright: ignore[reportPrivateUsage]
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import NoReturn

# What people write who know other commands.
ELSEWHERE = {
    "--format": "the suffix of -o says it: -o report.json",
    **dict.fromkeys(("--device", "--gpu", "--cuda"), "models run where they are loaded, on the CPU"),
    "--file": "write FILE alone, or --text FILE",
    "-f": "write FILE alone, or --text FILE",
    "-m": "write --model DIR",
    "-V": "write regard --version",
    **dict.fromkeys(("--layer", "--layers"), "name the layer and the head: --head L3H1"),
    **{
        f"--{suffix}": f"the suffix of -o says it: -o report.{suffix}"
        for suffix in ("html", "json", "png", "svg", "pdf")
    },
    **dict.fromkeys(("--save", "--file-name"), "write -o report.html"),
    **dict.fromkeys(("--show", "--browser"), "write --open"),
    **dict.fromkeys(("--tokens", "--max-tokens", "--max-length", "--limit"), "write head -c 4096 FILE | regard look -"),
    "--port": "a free port is chosen, and printed",
}
COMMANDS_ELSEWHERE = {
    "version": "regard --version",
    "help": "regard --help, or regard look --help",
    "serve": "regard look FILE --serve",
    "probe": "regard look --probe",
    **dict.fromkeys(
        ("plot", "show", "view", "visualize", "inspect", "run", "report"), "regard look FILE -o report.html"
    ),
    "diff": "regard compare FILE OTHER",
}

# The value that an option needs, and an example of one.
VALUES = {
    "--output": ("a file for the report", "report.html"),
    "--text": ("a file", "notes.txt"),
    "--words": ("a text in quotes", "'some words'"),
    "--encoding": ("the name of an encoding", "latin-1"),
    **dict.fromkeys(("--model", "--with-model"), ("a folder with a model of transformers, or minilm", "minilm")),
    **dict.fromkeys(("--head", "--with-head"), ("the label of a head", "L3H1")),
    "--seconds": ("a number of seconds", "30"),
}


def check_options(top: ArgumentParser, arguments: Sequence[str]) -> None:
    """Ends the process, as argparse does, with a sentence for a command line that cannot be read.

    These are unknown commands and options, options without the value that they need, and values of options that take
    none.
    """
    commands = _commands(top)
    given = list(arguments)
    first = next((n for n, each in enumerate(given) if not each.startswith("-") or each == "-"), len(given))
    own = " ".join(sorted(set(_options(top))))
    for option in _unknown(given[:first], _options(top)):
        behind = next((each for each in given if each in commands and option in _options(commands[each])), None)
        if behind is not None:
            top.error(f"regard has no option {option}; write it behind the command {behind}.")
        _refuse(top, option, commands, own)
    if first == len(given):
        return
    name = given[first]
    if name not in commands:
        near = get_close_matches(name.lower(), commands, 1)
        way = COMMANDS_ELSEWHERE.get(name) or _look_at(given[first:])
        way = f"did you mean {near[0]}?" if near else f"write {way}." if way else _has(commands)
        top.error(f"regard has no command {quote(name)}; {way}")
    for option in _unknown(given[first + 1 :], _options(commands[name])):
        _refuse(commands[name], option, commands, own)
    _check_given(commands[name], given[first + 1 :])


def check_values(top: ArgumentParser, options: Namespace, rest: Sequence[str]) -> None:
    """Ends the process, as argparse does, where a command is given more texts or names than it takes.

    rest: the arguments that no option and no name of the command has taken.
    """
    parser = _commands(top)[options.command]
    if options.command == "look":
        texts = [each for each in (options.words, options.text, options.file, *rest) if each is not None]
        if len(texts) > 1:
            files = [each for each in texts if each != options.words and os.path.exists(each)]
            way = "quote words: -t " + repr(" ".join(texts))
            if files or options.text is not None:
                way = (
                    f"regard compare {' '.join(files[:2])} compares two" if len(files) > 1 else "leave one of them out"
                )
            parser.error(f"regard look reads one text; {len(texts)} are given, {', '.join(map(repr, texts))}: {way}.")
    elif rest:
        ways = {
            "demo": f"it reads its own text; regard look {rest[0]} reads another",
            "compare": "it compares two texts",
            "bench": f"write --seconds {rest[0]} for the time",
            "doctor": "it examines one model",
        }
        said = ", ".join(map(repr, rest))
        parser.error(f"regard {options.command} does not take {said}; {ways[options.command]}.")


def _refuse(parser: ArgumentParser, option: str, commands: Mapping[str, ArgumentParser], own: str) -> NoReturn:
    known = _options(parser)
    near = get_close_matches(option, known, 1, 0.7)
    holders = [name for name, each in commands.items() if each is not parser and option in _options(each)]
    if option == "--model" and parser is commands["doctor"]:
        way = "write regard doctor DIR."
    elif holders:
        way = f"regard {holders[0]} has it."
    elif option in ELSEWHERE:
        way = f"{ELSEWHERE[option]}."
    elif near:
        way = f"did you mean {near[0]}?"
    elif option in own.split():
        way = "it stands before the command."
    elif before := get_close_matches(option, own.split(), 1, 0.7):
        way = f"did you mean regard {before[0]}?"
    else:
        way = _has(each for each in known if each.startswith("--"))
    parser.error(f"{parser.prog} has no option {option}; {way}")


def _look_at(given: Sequence[str]) -> str:
    """The command that reads what stands in the place of a command, a text, a file or a model; "" for other words."""
    name = given[0]
    if os.path.isfile(os.path.join(name, "config.json")):  # pathlib's raises OSError for what is too long for a name
        return f"regard look FILE --model {quote(name)}"
    if name == "-" or os.path.isfile(name) or Path(name).suffix or (os.sep in name and " " not in name):
        other = [each for each in given[1:2] if os.path.isfile(each)]
        return " ".join(["regard", "compare" if other else "look", *map(quote, (name, *other))])
    return f"regard look -t {quote(name)}" if " " in name else ""


def _check_given(parser: ArgumentParser, given: Sequence[str]) -> None:
    """Ends the process where an option has no value and needs one, has one and takes none, or has two."""
    seen = set[str]()
    for n, each in enumerate(given):
        if each == "--":
            return
        option, attached, value = each.partition("=")
        action = _action(parser, option) if _is_option(each) else None
        if action is None:
            continue
        if action.nargs == 0 and attached:
            parser.error(f"{option} takes no value, and {value!r} is given.")
        if action.nargs is None and not attached and (n + 1 == len(given) or _is_option(given[n + 1])):
            expected, example = next(VALUES[name] for name in action.option_strings if name in VALUES)
            parser.error(f"{option} has no value; expected {expected}, as in {option} {example}.")
        if action.nargs != 0 and action.dest in seen and not isinstance(action, _AppendAction):
            there = f"--with-{action.dest}" in _options(parser)
            way = f"the other {action.dest} is --with-{action.dest}" if there else "expected once"
            parser.error(f"{option} is given twice; {way}.")
        seen.add(action.dest)


def _action(parser: ArgumentParser, option: str) -> Action | None:
    """The option of that name, or the only one whose name begins so."""
    actions = parser._option_string_actions  # pyright: ignore[reportPrivateUsage]
    if option in actions:
        return actions[option]
    begun = [name for name in actions if option.startswith("--") and len(option) > 2 and name.startswith(option)]
    return actions[begun[0]] if len(begun) == 1 else None


def _is_option(each: str) -> bool:
    """Whether argparse reads a word as an option: not -, a number, or what holds a space."""
    return each.startswith("-") and each != "-" and " " not in each and not each[1:2].isdigit()


def _has(names: Iterable[str]) -> str:
    return f"it has {', '.join(names)}."


def _unknown(given: Sequence[str], known: Sequence[str]) -> list[str]:
    """The options that are not known. The beginning of a long one is enough; what holds a space is a value."""
    found = list[str]()
    for each in given:
        if each == "--":
            break
        option = each.split("=")[0]
        if not _is_option(each):
            continue
        if option.startswith("--"):
            there = any(one.startswith(option) for one in known)
        else:  # -o, or -oreport.png
            there = any(option.startswith(one) for one in known if len(one) == 2)
        found += [] if there else [option]
    return found


def _options(parser: ArgumentParser) -> list[str]:
    return list(parser._option_string_actions)  # pyright: ignore[reportPrivateUsage]


def _commands(top: ArgumentParser) -> dict[str, ArgumentParser]:
    found = (action.choices for action in top._actions if action.dest == "command")  # pyright: ignore[reportPrivateUsage]
    return dict(next(found))  # type: ignore[arg-type]
