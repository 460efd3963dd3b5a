"""Chat templates: jinja2 programs that come with a checkpoint, run in a sandbox with limits."""

import contextlib
import datetime
import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 10_000_000  # characters of a string a template may make, and of its output
MAX_STEPS = 1_000_000  # loop iterations, calls and operators
MAX_SECONDS = 10.0
MAX_PRODUCT = 100_000_000  # of the lengths one call works on, which bounds what replace or join can make


class ChatTemplate:
    """A compiled chat template; it sees what transformers gives it, so templates written for that work.

    The sandbox keeps a template from Python itself. The limits end the ways to run for ever or to fill
    the memory by loops, recursion, long strings and large numbers; lists nested in lists are not counted.
    """

    def __init__(self, source: str):
        """Raises ValueError in one sentence when the template does not parse."""
        self.source = source
        self._environment = _Sandbox()
        with one_sentence("The chat template does not parse"):
            self._template = self._environment.compile_limited(source)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Returns the prompt of a conversation; raises ValueError in one sentence when the template fails."""
        self._environment.restart()
        pieces, size = [], 0
        with one_sentence("The chat template failed"):
            for piece in self._template.generate(messages=messages, **variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_TEXT:
                    raise ValueError(f"it wrote more than {MAX_TEXT} characters")
        return "".join(pieces)


@contextlib.contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """Turns whatever foreign code raises into a ValueError of one sentence that starts with `what`.

    A panic of the tokenizers package arrives as a PanicException, which derives from BaseException only.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__
        raise ValueError(f"{what}: {text}.") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%", "//", "/", "-"])

    def __init__(self):
        # Constant folding would run filters before the limits are armed.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.restart()
        self.filters["tojson"] = _tojson
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        self.filters["_steps"] = self._steps
        self.filters["_bounded"] = _bounded
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    def restart(self) -> None:
        self._left, self._deadline = MAX_STEPS, time.monotonic() + MAX_SECONDS

    def compile_limited(self, source: str) -> jinja2.Template:
        """Returns the template with every loop counted and every string built in it bounded."""
        tree = self.parse(source)
        wrap = lambda node, name: nodes.Filter(node, name, [], [], None, None)
        for loop in tree.find_all(nodes.For):
            loop.iter = wrap(loop.iter, "_steps")
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = wrap(block.filter, "_bounded")
        # Depth first from the root: a node is replaced in its parent after its children were listed.
        for parent in list(tree.find_all(nodes.Node)):
            for field, value in list(parent.iter_fields()):
                if isinstance(value, nodes.Concat):
                    setattr(parent, field, wrap(value, "_bounded"))
                elif isinstance(value, list):
                    value[:] = [wrap(v, "_bounded") if isinstance(v, nodes.Concat) else v for v in value]
        nodes.Node.set_environment(tree, self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def tick(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it took more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise ValueError(f"it took more than {MAX_SECONDS:g} seconds")

    def call(self, context, obj, *args, **kwargs):
        self.tick()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        receiver = getattr(method, "__self__", None)
        if isinstance(receiver, str) and method.__name__ in ("format", "format_map"):
            _check_format(receiver)
        _check_arguments([receiver, *args, *kwargs.values()])
        return _bounded(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context, operator, left, right):
        self.tick()
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and numbers and (abs(left) > MAX_TEXT or abs(right) > 64):
            raise ValueError("it raises a number to too high a power")
        if operator == "*" and not numbers:
            times = [x if isinstance(x, int | float) else len(x) for x in (left, right)]
            if math.prod(times) > MAX_TEXT:
                raise ValueError(f"it repeats a value to more than {MAX_TEXT} elements")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_arguments([*right] if isinstance(right, tuple) else [right])
        return _bounded(super().call_binop(context, operator, left, right))

    def _steps(self, iterable: Iterable) -> Iterator:
        for item in iterable:
            self.tick()
            yield item

    def _limited(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)  # also copies the marks by which jinja2 passes the environment
        def limited(*args, **kwargs):
            self.tick()
            if name == "format":
                _check_format(str(args[0]))
            _check_arguments([*args, *kwargs.values()])
            return _bounded(function(*args, **kwargs))

        return limited


class _Generation(Extension):
    """The `{% generation %}` block, which marks the assistant's words for training and prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own tojson escapes HTML, which a prompt must not be.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any):
    raise jinja2.TemplateError(str(message))


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict) and len(value) > MAX_TEXT:
        raise ValueError(f"it made a value of more than {MAX_TEXT} elements")
    if isinstance(value, int) and value.bit_length() > 1024:
        raise ValueError("it made a number of more than 1024 bits")
    return value


def _check_format(text: str) -> None:
    if re.search(r"[0-9]{6}", text):
        raise ValueError("it formats a value to a width of six digits")


def _check_arguments(values: list[Any]) -> None:
    product = 1
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_TEXT:
            raise ValueError(f"it calls a function with {value:.3g}")
        if isinstance(value, str | list | tuple | dict):
            product *= max(len(value), 1)
    if product > MAX_PRODUCT:
        raise ValueError("it calls a function on values that are too long")
