"""What the reader of optimised programs makes of them. Needs no compiler."""

from __future__ import annotations

from tests.kernels.aot.hlo_text import parted_sums, products_of_libraries

SQUARE = """\
%fused_square (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %m = f32[8]{0} multiply(%p, %p)
}
"""
ADD = """
%fused_add (q: f32[8], r: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %r = f32[8]{0} parameter(1)
  %n = f32[8]{0} multiply(%q, %q)
  %moved = f32[8]{0} bitcast(%n)
  %s = f32[8]{0} add(%moved, %q)
  ROOT %t = f32[8]{0} add(%s, %r)
}
"""
PAIR = """
%fused_pair (p: f32[8]) -> (f32[8], f32[8]) {
  %p = f32[8]{0} parameter(0)
  %e = f32[8]{0} exponential(%p)
  %m = f32[8]{0} multiply(%p, %p)
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%e, %m)
}
"""


def entry(*lines: str) -> str:
    return "\nENTRY %main (x: f32[8]) -> f32[8] {\n" + "\n".join(f"  {x}" for x in lines) + "\n}\n"


def test_a_product_that_another_kernel_adds() -> None:
    x = "%x = f32[8]{0} parameter(0)"
    square = "%a = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_square"
    add = "ROOT %b = f32[8]{0} fusion(%x, %a), kind=kLoop, calls=%fused_add"
    assert parted_sums(SQUARE + ADD + entry(x, square, add)) == (1, 1)
    exponent = "%a = f32[8]{0} exponential(%x)"
    assert parted_sums(ADD + entry(x, exponent, add)) == (1, 0)


def test_a_kernel_with_several_results() -> None:
    x = "%x = f32[8]{0} parameter(0)"
    pair = "%two = (f32[8]{0}, f32[8]{0}) fusion(%x), kind=kLoop, calls=%fused_pair"
    add = "ROOT %b = f32[8]{0} fusion(%x, %a), kind=kLoop, calls=%fused_add"
    for index, apart in ((0, 0), (1, 1)):
        taken = f"%a = f32[8]{{0}} get-tuple-element(%two), index={index}"
        assert parted_sums(PAIR + ADD + entry(x, pair, taken, add)) == (1, apart)


def test_products_of_libraries() -> None:
    ours = 'custom-call(%x), custom_call_target="__gpu$xla.gpu.triton"'
    theirs = 'custom-call(%x), custom_call_target="__cublas$lt$matmul"'
    assert products_of_libraries(f"%a = f32[8] {ours}") == 0
    assert products_of_libraries(f"%a = f32[8] {theirs}\n%b = f32[8] {ours}") == 1
    assert products_of_libraries("%c = f32[8,8] dot(%x, %y)") == 1
