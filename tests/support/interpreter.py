"""Triton's interpreter without repeated work, and with two of its errors corrected.

`interpreted_quickly`: the same operations on the same numbers in a third of the time. As it comes, the interpreter replaces the
functions of `triton.language` again at each call of a device function, although the launch has done that. At each operation it
makes a table of types and new objects for a block's shape. And whether a sum or a product of integers overflows it finds out with a
dozen operations of Triton, whose result it does not look at; here NumPy finds it out, and an overflow ends the kernel.

`errors_corrected`: two things work as on a GPU in every version of Triton.
- A scalar comparison that is broadcast to a block stays boolean. The interpreter gives a comparison the type of its operands, and a
  broadcast converts to it; since Triton 3.9 a load or store refuses a mask that is not boolean.
- A constant times a tensor is a tensor for tl.exp2 and the like. The interpreter makes a constant of it, which 3.9 refuses there.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape

_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
"""Operators whose results are looked at, of int64."""


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    """A tensor's `shape` and `numel`. Tensors share them: nothing writes into them."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


@cache
def _checked(shape: tuple[int, ...]) -> tuple[tl.tuple, int]:
    """A block's `shape` and `numel`."""
    if not shape:
        raise TypeError("a block has at least one dimension")
    return tl.tuple(shape), validate_block_shape(shape)


def _block(self: tl.block_type, element_ty: tl.dtype, shape: object) -> None:
    """In place of `tl.block_type.__init__`."""
    sizes = tuple(_integers(shape))
    self.element_ty, self.name = element_ty, f"<{sizes}, {element_ty.name}>"
    self.shape, self.numel = _checked(sizes)


def _tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
    """In place of `tl.tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _sizes(tuple(type.shape.values) if type.is_block() else ())


def _integers(shape: object) -> list[object]:
    """Of a shape that may have compile-time constants."""
    values = shape.value if isinstance(shape, tl.constexpr) else shape
    values = values.values if isinstance(values, tl.tuple) else values
    return [size.value if isinstance(size, tl.constexpr) else size for size in values]


def _refuse_overflow(self: object, lhs: tl.tensor, rhs: tl.tensor, binary_op: Callable[..., object]) -> None:
    """In place of `TritonSemantic.binary_op_sanitize_overflow_impl`."""
    kind = lhs.type.scalar
    if kind.int_bitwidth < 64:
        found = _WIDE[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        if found.size and (found.min() < kind.get_int_min_value() or found.max() > kind.get_int_max_value()):
            raise OverflowError(f"{binary_op.__name__} of {kind}: {found.min()} to {found.max()}")


@contextmanager
def interpreted_quickly() -> Iterator[None]:
    """Within it interpreted launches take less time. Not for two threads."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    overflow = TritonSemantic.binary_op_sanitize_overflow_impl
    broadcast, convert = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
    patch, type_of = interpreter._patch_lang, interpreter._get_np_dtype
    call, tensor, block = interpreter.InterpretedFunction.__call__, tl.tensor.__init__, tl.block_type.__init__

    def patch_all(fn: object) -> object:
        """At a launch: also the functions that only device functions call."""
        scope = patch(fn)
        interpreter._patch_builtin(tl.core, interpreter.interpreter_builder, scope)
        interpreter._patch_lang_core(tl.core, scope)
        return scope

    def call_as_patched(self: object, *args: object, **kwargs: object) -> object:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    def broadcast_others(self: object, *tensors: tl.tensor) -> tuple[tl.tensor, ...]:
        """Most have one shape, which is one object (`_sizes`)."""
        return tensors if len({id(x.shape) for x in tensors}) == 1 else broadcast(self, *tensors)

    def cast_others(self: object, x: tl.tensor, dtype: tl.dtype, *rest: object, **named: object) -> tl.tensor:
        return x if x.dtype is dtype else convert(self, x, dtype, *rest, **named)

    known = cache(type_of)

    def numpy_type(dtype: tl.dtype) -> object:
        element = dtype.scalar
        return type_of(element) if element.is_ptr() else known(element)  # types of pointers and of blocks have no hash

    interpreter._patch_lang, interpreter._get_np_dtype = patch_all, numpy_type
    interpreter.InterpretedFunction.__call__, tl.tensor.__init__ = call_as_patched, _tensor
    tl.block_type.__init__, TritonSemantic.binary_op_sanitize_overflow_impl = _block, _refuse_overflow
    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_others, cast_others
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._get_np_dtype = patch, type_of
        interpreter.InterpretedFunction.__call__, tl.tensor.__init__ = call, tensor
        tl.block_type.__init__, TritonSemantic.binary_op_sanitize_overflow_impl = block, overflow
        TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast, convert


@contextmanager
def errors_corrected() -> Iterator[None]:
    """Within it comparisons stay boolean and products with constants are tensors. Not for two threads."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    splat, to_tensor = builder.create_splat, TritonSemantic.to_tensor

    def splat_boolean(self: object, block: tl.block_type, scalar: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if scalar.data.dtype == np.bool_:
            scalar = interpreter.TensorHandle(scalar.data, tl.int1)
        return splat(self, block, scalar)

    def tensor_of(self: object, x: object, *rest: object, **named: object) -> tl.tensor:
        return to_tensor(self, x.value if isinstance(x, tl.constexpr) else x, *rest, **named)

    builder.create_splat, TritonSemantic.to_tensor = splat_boolean, tensor_of
    try:
        yield
    finally:
        builder.create_splat, TritonSemantic.to_tensor = splat, to_tensor
