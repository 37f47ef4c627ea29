"""What an optimised program, as XLA prints it, tells of its arithmetic. Imports no jax."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")
_MOVES = {
    *("bitcast", "copy", "slice", "reshape", "transpose", "broadcast", "concatenate"),
    *("dynamic-slice",),
}
"""They change no number."""
_PRODUCTS = re.compile(r'custom_call_target="__(?:cublas|cudnn)[^"]*"| dot\(|kind":"__triton_gemm"')


@dataclass(frozen=True)
class _Instruction:
    is_root: bool
    type: str
    op: str
    operands: list[str]
    number: int
    """Of a parameter, or of an element of a tuple."""
    calls: str


_Program = dict[str, dict[str, _Instruction]]
"""Computation -> name -> instruction."""


def products_of_libraries(hlo: str) -> int:
    """Matrix products that XLA or a library computes, and not a kernel of ours."""
    return len(_PRODUCTS.findall(hlo))


def parted_sums(hlo: str) -> tuple[int, int]:
    """Float32 additions of a product of two numbers: how many have the multiplication in their own
    kernel, where both may become one instruction with one rounding, and how many have it in
    another one. If only some programs of an engine part a pair, they round differently.
    """
    program = _parsed(hlo)
    together = apart = 0
    for name, body in program.items():
        for call in body.values():
            if call.op != "fusion" or call.calls not in program:
                continue
            for operand in _addends(program, call.calls):
                if operand.op == "multiply":
                    together += 1
                elif operand.op == "parameter":
                    given = call.operands[operand.number]
                    apart += any(p.op == "multiply" for p in _made_by(program, name, given))
    return together, apart


def _parsed(hlo: str) -> _Program:
    program: _Program = {}
    body: dict[str, _Instruction] = {}
    for line in hlo.splitlines():
        begins, found = _COMPUTATION.match(line), _INSTRUCTION.match(line)
        if begins:
            body = program.setdefault(begins[1], {})
        elif found:
            inside = found[5].split(")")[0]
            number = re.search(r"index=(\d+)", line) or re.match(r"(\d+)", inside)
            calls = re.search(r"calls=%?([\w.\-]+)", line)
            body[found[2]] = _Instruction(
                bool(found[1]),
                found[3],
                found[4],
                re.findall(r"%([\w.\-]+)", inside),
                int(number[1]) if number else 0,
                calls[1] if calls else "",
            )
    return program


def _addends(program: _Program, computation: str) -> Iterator[_Instruction]:
    for one in program[computation].values():
        if one.op in ("add", "subtract") and one.type.startswith("f32"):
            for operand in one.operands:
                yield from _sources(program, computation, operand)


def _sources(program: _Program, computation: str, name: str) -> Iterator[_Instruction]:
    """The instructions that made a value, behind those that only move it."""
    one = program[computation].get(name)
    if one is None:
        return
    if one.op not in _MOVES:
        yield one
        return
    for operand in one.operands:
        yield from _sources(program, computation, operand)


def _made_by(program: _Program, computation: str, name: str) -> Iterator[_Instruction]:
    """The same, looking into the kernel that a value comes out of."""
    for one in _sources(program, computation, name):
        index, made = 0, one
        if one.op == "get-tuple-element":
            index = one.number
            behind = program[computation].get(one.operands[0])
            if behind is None:
                continue
            made = behind
        if made.op != "fusion" or made.calls not in program:
            yield made
            continue
        for result, last in program[made.calls].items():
            if last.is_root:
                out = last.operands[index] if last.op == "tuple" else result
                yield from _sources(program, made.calls, out)
