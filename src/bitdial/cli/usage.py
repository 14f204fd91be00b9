"""Words on the command line: how wrong usage is answered, and texts that are safe to print."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn


def printable(text: str) -> str:
    """`text` without what would break its line or steer a terminal: names in a file may be anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(word: str, known: Iterable[object]) -> str:
    """', did you mean train?', if one of the `known` words is close to `word`; else nothing."""
    close = get_close_matches(word, list(map(str, known)), n=1)
    return f", did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """argparse's, which answers wrong usage in two lines and knows the words that were meant.

    `apart` has parsers by name: where the first word is such a name, that parser takes the rest.
    """

    apart: Mapping[str, "Parser"] = MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end the process with 2."""
        self.exit(2, f"{self.prog}: {message}\nFor help: {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; of a command, what it does not know is an error, said before what is missing."""
        if args and args[0] in self.apart:
            return self.apart[args[0]].parse_known_args(args[1:], namespace)
        if self._subparsers is not None or args is None:
            return super().parse_known_args(args, namespace)
        self._check_options(args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"this is too much: {' '.join(rest)}")
        return found, rest

    def _check_options(self, words: Sequence[str]) -> None:
        known = [name for action in self._actions for name in action.option_strings]
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                self.error(f"there is no option {name}{did_you_mean(name, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = list(map(str, action.choices))
            guess = did_you_mean(str(value), words) or f"; choose one of {', '.join(words)}"
            raise argparse.ArgumentError(action, f"{value!r} is not known{guess}")
