"""The sandboxed Jinja environment in which chat templates run: everything they do is charged to a meter.

Beyond the operators, filters and methods, which the sandbox lets us intercept, the parsed template is rewritten: every
loop turn, macro call and output counts as a step, and `~` and list, tuple and dict displays become checked calls.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jaxinfer.tokenizer import template_limits as limits


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training masks; here it only groups."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Metering(NodeTransformer):
    """Adds the calls that count work. They are attributes of the environment, which templates cannot shadow."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_step(node)

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        num_constant = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        self.generic_visit(node)
        return [_step(num_constant, node.lineno), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_values", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._display(node, bool(node.items))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._display(node, bool(node.items))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        # A tuple that is assigned to is no value.
        return self._display(node, node.ctx == "load")

    def _display(self, node: nodes.Expr, is_value: bool) -> nodes.Node:
        self.generic_visit(node)
        return _call("built", [node], node.lineno) if is_value else node

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body = [_step(0, node.lineno), *node.body]
        return node


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=lineno)


def _step(num_constant: int, lineno: int) -> nodes.Stmt:
    return nodes.ExprStmt(_call("step", [nodes.Const(num_constant)], lineno), lineno=lineno)


@pass_context
def _finalize(_context: Context, value: Any) -> Any:
    """Charge for a value before it is written. (Taking the context keeps it from running while compiling.)"""
    limits.measure(value)
    return value


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja for chat templates, with metered work."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=_finalize,
            # Constants are folded while compiling, where nothing is metered.
            optimized=False,
        )
        self.step = limits.step
        self.concat_values = limits.concat
        self.built = limits.built
        self.filters = limits.limited_filters(self.filters)
        del self.globals["lipsum"]
        self.globals |= {
            "strftime_now": limits.strftime_now,
            "dict": limits.plain_dict,
            "namespace": limits.PlainNamespace,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metering().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and limits.is_allowed_method(obj, attr)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limits.check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        # A formatting method has been wrapped by the sandbox.
        method = getattr(__obj, "__wrapped__", __obj)
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str):
            limits.check_method(text, name, args, kwargs)
            if name == "format_map":
                raise SecurityError("str.format_map is not available")
            if name == "replace":
                return limits.replace(text, *args, **kwargs)
            if name == "join" and args:
                return limits.join(args[0], text)
        result = super().call(__context, __obj, *args, **kwargs)
        return limits.charge_result(result)
