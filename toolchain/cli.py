"""The command line: invoke, with the exit codes and the grouped list of verbs of this artifact.

Promise: a foreseen failure in a verb (toolchain.errors) is one `error: ...` on standard error and
its exit code, wrong usage is one line and exit code 2, an interrupt is exit code 130; none shows a
traceback.  This holds for ./inv and for a plain `invoke` inside the environment.  Without a verb,
and with --list, the verbs are shown in their groups.
Limit: a plain `invoke` learns of this module only when it loads tasks.py; options of invoke itself
that are wrong before that (a missing value of --config) still end with its own exit code 1.
"""

import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import invoke
import invoke.main
import invoke.program
import invoke.tasks
from invoke.exceptions import Exit, ParseError
from invoke.tasks import Task
from invoke.util import helpline

from toolchain.command import Cancelled
from toolchain.errors import ArtifactError, UsageError

Body = TypeVar("Body", bound=Callable[..., object])

_REPO = Path(__file__).resolve().parents[1]
_INTERRUPTED = 130
_PIPE_CLOSED = 141
_OTHER_GROUP = "Other"
_INV = "./inv"
_LIST_FORMATS = ("flat", "nested", "json")


def task(*, group: str, words: str | None = None, **options: Any) -> Callable[[Body], "Task[Body]"]:
    """invoke.task with the heading under which --list shows the verb.

    words: the option that bare words after the verb belong to: with words="results", `analyze a b`
    is `analyze --results a --results b`.  Such a verb must be the last one called.

    The groups are shown in the order in which tasks.py first names them, the verbs of a group in
    the order of their definition.  `options` are those of invoke.task (help, name, optional, ...).
    """

    def decorate(body: Body) -> "Task[Body]":
        # By the order of the options -a would be --accept here and --any-commit there.
        made: Task[Body] = invoke.tasks.task(auto_shortflags=False, **options)(body)
        made.group = group  # type: ignore[attr-defined]
        made.words = words  # type: ignore[attr-defined]
        return made

    return decorate


@contextmanager
def _verb_failures() -> Iterator[None]:
    """Turn foreseen failures into invoke's Exit, which prints its message and ends."""
    try:
        yield
    except ArtifactError as error:
        raise Exit(f"error: {error}", code=error.exit_code) from error
    except (KeyboardInterrupt, Cancelled) as error:
        raise Exit("interrupted", code=_INTERRUPTED) from error


@contextmanager
def _usage_failures() -> Iterator[None]:
    """The same before a verb runs, where all that invoke complains about is wrong usage."""
    try:
        with _verb_failures():
            yield
    except ParseError as error:
        raise _usage(str(error)) from error
    except Exit as error:
        # Exit without a message is a normal end (--list, --help); code 1 is invoke's own.
        raise _usage(error.message) if error.message and error.code == 1 else error from error


_PLAIN = (
    (r"No idea what '(.*)' is!", r"'\1' is no verb and nothing that fits here"),
    (r"Flag <Argument: (\S+).*> needed value and was not given one!", r"--\1: a value is missing"),
)
"""What invoke says, and the same for a person."""


def _usage(message: str) -> Exit:
    for theirs, ours in _PLAIN:
        message = re.sub(theirs, ours, message)
    advice = "./inv --list shows the verbs, ./inv --help VERB the options of one"
    return Exit(f"error: usage: {message} ({advice})", code=UsageError.exit_code)


class Program(invoke.program.Program):
    """invoke's program, each of its stages with our exit codes."""

    def create_config(self) -> None:
        super().create_config()
        if self.binary == _INV:
            # ./inv is about its own checkout, whatever the working directory is.
            self.config.tasks.search_root = str(_REPO)

    def parse_core(self, argv: list[str] | None) -> None:
        with _usage_failures():
            super().parse_core(argv)
            if self.args.help.value is True:  # no verb named: invoke would explain only itself
                self.args.help.set_value(None, cast=False)
                self.args.list.set_value(True, cast=False)

    def parse_collection(self) -> None:
        with _usage_failures():
            super().parse_collection()

    def parse_tasks(self) -> None:
        with _usage_failures():
            self.core.unparsed = self._bare_words_as_options(self.core.unparsed)
            try:
                super().parse_tasks()
                self._refuse_missing_values(self.core.unparsed)
            except ValueError as error:  # int() of what was given to an option
                got = str(error).partition(": ")[2] or str(error)
                raise ParseError(f"an option takes a whole number, got {got}") from error

    def _bare_words_as_options(self, words: list[str]) -> list[str]:
        """Put the option's name before each bare word after a verb that has `words`.

        invoke's own description of a verb cannot be asked: making it a second time loses the help.
        """
        for at, word in enumerate(words):
            verb = self.collection.tasks.get(word)
            option = getattr(verb, "words", None)
            if verb is not None and option is not None:
                return [*words[: at + 1], *_named(words[at + 1 :], option, verb.body)]
        return words

    def _refuse_missing_values(self, words: Sequence[str]) -> None:
        """Refuse an option without a value, which may be repeated (invoke takes it for absent).

        And an empty one, as of an unset variable of a shell: it would be taken for absent, too.
        """
        for argument in (one for verb in self.tasks for one in verb.args.values()):
            given = argument.value if argument.got_value else None
            if given == "" or (isinstance(given, list) and "" in given):
                raise ParseError(f"--{argument.name}: got an empty value")
        for word, following in itertools.pairwise([*words, "--"]):
            for flags in (verb.flags for verb in self.tasks if word in verb.flags):
                if flags[word].kind is list and following.startswith("-"):
                    raise ParseError(f"--{flags[word].name}: a value is missing")

    def parse_cleanup(self) -> None:
        with _usage_failures():
            super().parse_cleanup()

    def execute(self) -> None:
        with _verb_failures():
            super().execute()

    def list_tasks(self) -> None:
        if self.list_format not in _LIST_FORMATS:
            expected = ", ".join(_LIST_FORMATS)
            raise ParseError(f"--list-format: got {self.list_format!r}, expected {expected}")
        super().list_tasks()

    def no_tasks_given(self) -> None:
        self.list_tasks()
        raise Exit

    def list_flat(self) -> None:
        groups: dict[str, list[tuple[str, str | None]]] = {}
        verbs = self.scoped_collection.tasks
        for name, verb in sorted(verbs.items(), key=lambda item: _defined_at(item[1])):
            group = getattr(verb, "group", _OTHER_GROUP)
            groups.setdefault(group, []).append((name, helpline(verb)))
        width = max((len(name) for name in verbs), default=0)
        print(f"Usage: {self.binary} VERB [--options]\n")
        for group, pairs in groups.items():
            print(f"{group}:")
            self.print_columns([(name.ljust(width), text) for name, text in pairs])
        print(f"{self.binary} --help VERB explains a verb and its options.")


def _defined_at(verb: "Task[Callable[..., object]]") -> int:
    return verb.body.__code__.co_firstlineno


def _named(words: Sequence[str], option: str, body: Callable[..., Any]) -> Iterator[str]:
    """The words after a verb, with --option before each that is neither an option nor its value."""
    parameters = inspect.signature(body).parameters.values()
    switches = {f"--{p.name.replace('_', '-')}" for p in parameters if p.default in (True, False)}
    value_follows = False
    for word in words:
        if not value_follows and not word.startswith("-"):
            yield f"--{option}"
        value_follows = word.startswith("-") and "=" not in word and word not in switches
        yield word


def main(arguments: list[str]) -> None:
    """Run the verbs in `arguments` as ./inv does; ends with sys.exit()."""
    program = Program(name="bananaOS", binary=_INV, version=f"with invoke {invoke.__version__}")
    try:
        try:
            program.run([_INV, *arguments])
        finally:  # run() may end with sys.exit(), too; left to Python, a failure would be its words
            sys.stdout.flush()
    except BrokenPipeError:  # of `./inv --list | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_PIPE_CLOSED)
    sys.exit(0)


# A plain `invoke` has its Program running already when tasks.py imports this module; giving that
# one object our class is what makes both ways of calling behave the same from here on.
invoke.main.program.__class__ = Program
