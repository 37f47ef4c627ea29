"""The Jinja that chat templates are written for, with everything they do counted in a `Budget`.

It looks as transformers' does (white space, globals, `tojson`), less the filters for HTML and for
placeholder text. What the tree of a template does beyond calls, filters, tests and operators, which
Jinja lets a sandbox intercept, is wrapped into filters of our own when it is parsed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from jaxpaged.text.budget import (
    Budget,
    TemplateLimitError,
    check_format_spec,
    check_items,
    check_percent,
    check_power,
    check_times,
)
from jaxpaged.text.template_filters import filters
from jaxpaged.text.template_methods import check_method

MAX_PATTERN = 200
"""Characters of a pattern for `strftime_now`."""
T = TypeVar("T")


class Sandbox(ImmutableSandboxedEnvironment):
    """Each thread has its own budget, for the time of `limited`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        # No optimizer: it would run filters on constants while compiling, outside of any budget.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_printed,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._local = threading.local()
        self.filters = {name: self._metered(function) for name, function in filters().items()}
        self.filters |= {_TICK: _tick, _MADE: _made, _PRINTED: _printed_part}
        tests: Iterable[tuple[str, Any]] = self.tests.items()
        self.tests = {name: self._metered(function) for name, function in tests}
        self.globals = {
            "range": _range,
            "dict": _dict,
            "namespace": _Namespace,
            "cycler": jinja2.utils.Cycler,
            "joiner": jinja2.utils.Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    @property
    def budget(self) -> Budget:
        budget: Budget = self._local.budget
        return budget

    @contextlib.contextmanager
    def limited(self, seconds: float | None = None) -> Iterator[Budget]:
        """Compile and render within this, and what the template does is counted."""
        budget = self._local.budget = Budget(seconds)
        try:
            yield budget
        finally:
            del self._local.budget  # it holds all that the template made

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return template

    def _metered(self, function: Callable[..., T]) -> Callable[..., T]:
        """A filter or test that counts its calls and what it makes."""

        @functools.wraps(function)  # takes along whether Jinja passes the context first
        def metered(*args: Any, **kwargs: Any) -> T:
            self.budget.tick()
            return self.budget.made(function(*args, **kwargs))

        return metered

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.tick()
        if operator == "*":
            check_times(left, right)
            check_times(right, left)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            check_percent(budget, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget
        budget.tick()
        for value in (*args, *kwargs.values()):
            budget.printed_size(value)  # a macro's arguments become a list
        owner = getattr(function, "__self__", None)
        if owner is not None:
            args = check_method(budget, owner, function.__name__, args)
        return budget.made(super().call(context, function, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.tick()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        formatter, text, by_map = _Formatter(self), value.__self__, value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            if by_map:
                return formatter.vformat(text, (), *args)
            return formatter.vformat(text, args, kwargs)

        return formatted


class _Formatter(SandboxedFormatter):
    """`str.format` with its widths checked, also computed ones."""

    _env: Sandbox

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        self._env.budget.tick()
        return super().get_field(field_name, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(self._env.budget.printed(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        check_format_spec(format_spec)
        text: str = super().format_field(value, format_spec)
        return self._env.budget.made(text)


_TICK, _MADE, _PRINTED = "tick!", "made!", "printed!"  # names that no template can spell


@jinja2.pass_environment
def _tick(environment: Sandbox, value: bool) -> bool:
    environment.budget.tick()
    return value


@jinja2.pass_environment
def _made(environment: Sandbox, value: T) -> T:
    return environment.budget.made(value)


@jinja2.pass_environment
def _printed_part(environment: Sandbox, value: T) -> T:
    return environment.budget.printed(value)


@jinja2.pass_context
def _printed(context: jinja2.runtime.Context, value: T) -> T:
    """Called by Jinja with everything that is printed."""
    environment = context.environment
    assert isinstance(environment, Sandbox)
    return environment.budget.printed(value)


class _Counting(NodeTransformer):
    """Makes a template count its loops, its constant text, and the values it builds itself."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = _filtered(nodes.Const(True, lineno=node.lineno), _TICK)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:  # runs also where the body does not
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # which is finalized, and so counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, _PRINTED) for part in node.nodes]
        return _filtered(node, _MADE)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(self.generic_visit(node), _MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), _MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _filtered(node, _MADE)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - typed so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Namespaces can be changed, so what they hold cannot be measured; hence they print nothing
    of it.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespaces have no attribute {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    try:
        check_items(len(numbers))
    except OverflowError as error:
        raise TemplateLimitError("it makes a range beyond all limits") from error
    return numbers


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object = "") -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_PATTERN:
        raise TemplateLimitError(f"it gives strftime_now more than {MAX_PATTERN} characters")
    return datetime.now().strftime(pattern)
