"""Options and commands that there are not: named before anything else is said, with the nearest that there is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

# What people write who know other commands.
ELSEWHERE = {
    "--format": "the suffix of -o says it: -o report.json",
    "--device": "models run where they are loaded, on the CPU",
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
    "version": "write regard --version",
    "help": "write regard --help, or regard look --help",
    "serve": "write regard look FILE --serve",
    "probe": "write regard look --probe",
    **dict.fromkeys(
        ("plot", "show", "view", "visualize", "inspect", "run", "report"), "write regard look FILE -o report.html"
    ),
    "diff": "write regard compare FILE OTHER",
}


def check_options(top: ArgumentParser, arguments: Sequence[str]) -> None:
    """Ends the process, as argparse does, with a sentence where a command or an option is not known."""
    commands = _commands(top)
    given = list(arguments)
    first = next((n for n, each in enumerate(given) if not each.startswith("-")), len(given))
    own = " ".join(sorted(set(_options(top))))
    for option in _unknown(given[:first], _options(top)):
        _refuse(top, option, commands, own)
    if first == len(given):
        return
    name = given[first]
    if name not in commands:
        near = get_close_matches(name.lower(), commands, 1)
        way = f"{COMMANDS_ELSEWHERE[name]}." if name in COMMANDS_ELSEWHERE else _has(commands)
        top.error(f"regard has no command {name}; {f'did you mean {near[0]}?' if near else way}")
    for option in _unknown(given[first + 1 :], _options(commands[name])):
        _refuse(commands[name], option, commands, own)


def check_values(top: ArgumentParser, options: Namespace, rest: Sequence[str]) -> None:
    """Ends the process, as argparse does, where a command is given more texts or names than it takes.

    rest: the arguments that no option and no name of the command has taken.
    """
    parser = _commands(top)[options.command]
    if options.command == "look":
        texts = [each for each in (options.words, options.text, options.file, *rest) if each is not None]
        if len(texts) > 1:
            files = [each for each in texts if each != options.words and Path(each).exists()]
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
    if holders:
        way = f"regard {holders[0]} has it."
    elif option in ELSEWHERE:
        way = f"{ELSEWHERE[option]}."
    elif near:
        way = f"did you mean {near[0]}?"
    elif option in own.split():
        way = "it stands before the command."
    else:
        way = _has(each for each in known if each.startswith("--"))
    parser.error(f"{parser.prog} has no option {option}; {way}")


def _has(names: Iterable[str]) -> str:
    return f"it has {', '.join(names)}."


def _unknown(given: Sequence[str], known: Sequence[str]) -> list[str]:
    """The options that are not known. The beginning of a long one is enough; what holds a space is a value."""
    found = list[str]()
    for each in given:
        if each == "--":
            break
        option = each.split("=")[0]
        if not option.startswith("-") or option == "-" or " " in each or option[1].isdigit():
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
